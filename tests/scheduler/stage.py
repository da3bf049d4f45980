"""Drives the scheduler's core by hand: the test sets the clock and reads the messages that each peer would receive."""

from collections.abc import Sequence

from services.hashing import KEY_BYTES
from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import (
    Adapter,
    Assigned,
    Card,
    Command,
    DropWorker,
    EndedJob,
    GatewayMessage,
    Joined,
    Rejected,
    Role,
    RunningJob,
    Submit,
    Suspects,
    ToGateway,
    ToWorker,
    WorkerHello,
    WorkerLoading,
    WorkerMessage,
    WorkerReport,
)
from services.scheduler.core.scheduler import SchedulerCore

CARD = Card("story", aliases=("tale",), fingerprint=b"f" * 32, block_size=16, bundle_digest=b"b" * 32)


def keys(*names: int) -> bytes:
    """Block keys, concatenated as in a request."""
    return b"".join(name.to_bytes(KEY_BYTES, "big") for name in names)


class Stage:
    """The real core with recorded messages. Checks the core's integrity after each event unless `check` is false."""

    def __init__(self, limits: Limits | None = None, *, started: float = 0.0, check: bool = True) -> None:
        self.now = 100.0
        self.core = SchedulerCore(epoch=7, now=started, limits=limits)
        self.inbox: dict[str, list[GatewayMessage]] = {}
        self.worker_inbox: dict[str, list[WorkerMessage]] = {}
        self.dropped: list[str] = []
        self.steps = 0
        self.check = check

    def perform(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case ToGateway(gateway_id, message):
                    self.inbox.setdefault(gateway_id, []).append(message)
                case ToWorker(worker_id, message):
                    self.worker_inbox.setdefault(worker_id, []).append(message)
                case DropWorker(worker_id):
                    self.dropped.append(worker_id)
        if self.check:
            self.core.check_integrity()

    # ---- events ----

    def gateway(self, gateway_id: str = "g1") -> str:
        self.perform(self.core.on_gateway_attached(gateway_id, self.now))
        return gateway_id

    def gateway_leaves(self, gateway_id: str = "g1") -> None:
        self.perform(self.core.on_gateway_detached(gateway_id, self.now))

    def submit(self, job_id: str, gateway: str = "g1", **fields: object) -> GatewayMessage | None:
        """Submits a job and returns its answer, or None if the job waits."""
        known: dict[str, object] = {"model": "story", "prompt_tokens": 32, "max_tokens": 16} | fields
        submit = Submit(job_id, **known)  # type: ignore[arg-type]
        before = len(self.inbox.get(gateway, []))
        self.perform(self.core.on_submit(gateway, submit, self.now))
        return next(iter(self.inbox.get(gateway, [])[before:]), None)

    def survived(self, job_id: str, gateway: str = "g1") -> None:
        self.perform(self.core.on_survived(gateway, job_id, self.now))

    def suspects(self, gateway: str = "g1") -> tuple[bytes, ...]:
        """The fingerprints that a gateway received last."""
        return [m.fingerprints for m in self.inbox[gateway] if isinstance(m, Suspects)][-1]

    def unreachable(self, gateway: str, *addresses: str) -> None:
        self.perform(self.core.on_unreachable(gateway, frozenset(addresses), self.now))

    def loading(self, worker_id: str, model: str = "story") -> None:
        self.perform(self.core.on_loading(WorkerLoading(worker_id, model), self.now))

    def withdraw(self, job_id: str, gateway: str = "g1") -> None:
        self.perform(self.core.on_withdraw(gateway, job_id, self.now))

    def worker(
        self,
        worker_id: str = "w1",
        *,
        credits: int = 1,
        card: Card = CARD,
        running: Sequence[str] = (),
        attempt: int = 1,
        stored: bytes = b"",
        adapters: Sequence[Adapter] = (),
        role: Role = Role.BOTH,
    ) -> str:
        refs = tuple(RunningJob(job_id, attempt) for job_id in running)
        hello = WorkerHello(worker_id, f"{worker_id}:1", card, credits, refs, stored, tuple(adapters), role)
        self.perform(self.core.on_worker_attached(hello, self.now))
        return worker_id

    def report(
        self,
        worker_id: str = "w1",
        *ended: str,
        attempt: int = 1,
        tokens: int = 16,
        placement: int = 0,
        handed_off: bool = False,
        **fields: object,
    ) -> None:
        """Reports from a worker; by default with one step more than before, which is progress."""
        self.steps += 1
        known: dict[str, object] = {"steps": self.steps, "running": 1} | fields
        ends = tuple(EndedJob(job_id, attempt, tokens, placement, handed_off) for job_id in ended)
        report = WorkerReport(ended=ends, **known)  # type: ignore[arg-type]
        self.perform(self.core.on_report(worker_id, report, self.now))

    def worker_leaves(self, worker_id: str = "w1") -> None:
        self.perform(self.core.on_worker_detached(worker_id, self.now))

    def pass_time(self, seconds: float, *, heartbeat: Sequence[str] = ()) -> None:
        """Ticks every 50 ms; workers in `heartbeat` make progress."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            for worker_id in heartbeat:
                self.report(worker_id)
            self.perform(self.core.on_tick(self.now))

    # ---- answers ----

    def answers(self, gateway: str = "g1") -> list[Assigned | Joined | Rejected]:
        return [m for m in self.inbox.get(gateway, []) if isinstance(m, Assigned | Joined | Rejected)]

    def placed(self, gateway: str = "g1") -> list[tuple[str, str]]:
        """(job, worker) in the order of assignment."""
        return [(m.job_id, m.worker_id) for m in self.answers(gateway) if isinstance(m, Assigned)]

    def joined(self, gateway: str = "g1") -> list[tuple[str, str]]:
        """(job, leader) in order."""
        return [(m.job_id, m.leader_job_id) for m in self.answers(gateway) if isinstance(m, Joined)]

    def rejected(self, gateway: str = "g1") -> dict[str, str]:
        """Reason by job."""
        return {m.job_id: m.failure.reason for m in self.answers(gateway) if isinstance(m, Rejected)}
