"""How the time of a request was spent, and what it cost. Pure arithmetic; the clock is an argument."""

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh


class Phase(enum.IntEnum):
    """What a request does or waits for at an instant, as seen by the gateway."""

    OWN = 0
    """Other work of the gateway, reported as `unaccounted_s`."""
    TOKENIZE = 1
    """Waiting for the tokenizer, tokenizing, and compiling the form of a structured answer."""
    REMOTE = 2
    """Waiting for scheduler, worker or cache."""
    DETOKENIZE = 3
    """Converting tokens to text."""
    DELIVER = 4
    """Waiting for the client to read."""


_PHASES = len(Phase)


class Timeline:
    """Attributes every instant since its creation to exactly one phase."""

    __slots__ = ("_clock", "_seconds", "began", "phase", "since")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = self.since = clock()
        self.phase = Phase.OWN
        self._seconds = [0.0] * _PHASES

    def enter(self, phase: Phase) -> None:
        """Begins a phase, and ends the one before."""
        now = self._clock()
        self._seconds[self.phase] += now - self.since
        self.since = now
        self.phase = phase

    def visit(self, phase: Phase, began: float) -> None:
        """Attributes the time since `began`, on the timeline's clock, to another phase than the one that goes on."""
        now = self._clock()
        seconds = self._seconds
        seconds[self.phase] += began - self.since
        seconds[phase] += now - began
        self.since = now

    def spent(self, phase: Phase) -> float:
        """Seconds in a phase, up to the last change of phase."""
        return self._seconds[phase]

    def wall(self) -> float:
        """Seconds from the creation to the last change of phase."""
        return self.since - self.began


_COUNTS = (
    "prefill_tokens", "cached_tokens", "fetched_tokens", "preemptions", "drafted_tokens", "accepted_tokens",
)  # fmt: skip
"""Costs that are summed over attempts, and over the continuations of a request."""


@dataclass(slots=True)
class AttemptCosts:
    """The costs of one continuation at scheduler and workers, summed over its attempts."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    attempts: int = 0
    workers: list[str] = field(default_factory=list)
    hit: bool = False
    joined: bool = False

    def assigned(self, worker_id: str, queue_s: float) -> None:
        """Counts an attempt that the scheduler placed."""
        self.attempts += 1
        self.queue_s += queue_s
        self.continued(worker_id)

    def continued(self, worker_id: str) -> None:
        """Notes a worker that runs an attempt, or a part of it."""
        if worker_id not in self.workers:
            self.workers.append(worker_id)

    def add(self, cost: mesh.JobCost) -> None:
        """Adds an attempt's cost. The tokens of a joined generation are on its leader's receipt."""
        self.queue_s += cost.queue_s
        self.prefill_s += cost.prefill_s
        self.decode_s += cost.decode_s
        if not self.joined:
            for field, count in cost.ListFields():  # Most are 0.
                if field.name in _COUNTS:
                    setattr(self, field.name, getattr(self, field.name) + count)

    def answered_by_cache(self) -> None:
        """The result cache had the answer: the costs of attempts do not count."""
        self.queue_s = self.prefill_s = self.decode_s = 0.0
        self.attempts = 0
        for name in _COUNTS:
            setattr(self, name, 0)
        self.workers.clear()
        self.hit = True


def timings(timeline: Timeline, costs: AttemptCosts | None, first_token_at: float | None) -> api.Timings:
    """Splits the wall time of one request. `costs` are those of the continuation that ended last.

    The time measured by workers may overlap with the gateway's own work and with a slow client, and may have begun
    before a request that joined. No instant is counted twice; the worker's times take precedence.
    """
    costs = costs or AttemptCosts()
    remote, deliver = timeline.spent(Phase.REMOTE), timeline.spent(Phase.DELIVER)
    cache_s = remote if costs.hit else 0.0
    waited = remote - cache_s + deliver
    left = waited + timeline.spent(Phase.DETOKENIZE)
    decode_s = min(costs.decode_s, left)
    prefill_s = min(costs.prefill_s, left - decode_s)
    queue_s = min(costs.queue_s, left - decode_s - prefill_s)
    measured_s = decode_s + prefill_s + queue_s
    network_s = max(0.0, waited - measured_s)
    return api.Timings(
        wall_s=timeline.wall(),
        tokenize_s=timeline.spent(Phase.TOKENIZE),
        cache_s=cache_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        detokenize_s=max(0.0, left - measured_s - network_s),
        network_s=network_s,
        unaccounted_s=timeline.spent(Phase.OWN),
        first_token_s=max(0.0, first_token_at - timeline.began) if first_token_at is not None else 0.0,
    )


def fill_costs(receipt: api.Receipt, continuations: Iterable[AttemptCosts]) -> None:
    """Sums the costs of a request's continuations into its receipt."""
    for costs in continuations:
        for name in _COUNTS:
            if count := getattr(costs, name):
                setattr(receipt, name, getattr(receipt, name) + count)
        receipt.attempts = max(receipt.attempts, costs.attempts)
        receipt.result_hit |= costs.hit
        receipt.joined |= costs.joined
        receipt.workers.extend(worker for worker in costs.workers if worker not in receipt.workers)
