"""Events that the scheduler receives and messages that it sends, as plain values. Knows neither sockets nor protobuf.

Where a value has the name of a message of protos/mesh.proto, its fields mean the same.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Code(IntEnum):
    """The google.rpc.Code values that the scheduler answers with."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14


class Role(IntEnum):
    """What a worker is for; the values are those of WorkerRole in protos/inference.proto."""

    BOTH = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job or a worker is refused, ready for the client. `retry_after_s` is 0 if a retry makes no sense."""

    code: Code
    reason: str
    message: str
    retry_after_s: float = 0.0
    field: str = ""


# ---- received ----


@dataclass(frozen=True, slots=True)
class Card:
    """What distinguishes models. `detail` is the whole ModelCard, which the core forwards and never reads."""

    name: str
    aliases: tuple[str, ...] = ()
    fingerprint: bytes = b""
    block_size: int = 16
    bundle_digest: bytes = b""
    detail: object = None

    def conflicts_with(self, other: "Card") -> bool:
        """Whether workers with these two cards cannot continue each other's jobs."""
        mine = (self.fingerprint, self.block_size, self.bundle_digest)
        return mine != (other.fingerprint, other.block_size, other.bundle_digest)


@dataclass(frozen=True, slots=True)
class Submit:
    """A gateway requests a worker for a job. `deadline_s` is None if the job has no deadline."""

    job_id: str
    attempt: int = 1
    model: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    block_keys: bytes = b""
    deadline_s: float | None = None
    tenant: str = ""
    priority: int = 0
    identity: bytes = b""
    body: bytes = b""
    avoid: frozenset[str] = frozenset()
    unjoinable: str = ""
    fingerprint: bytes = b""
    lost_on: str = ""
    lost_after: int = 0
    sheddable: bool = False
    adapter: bytes = b""

    @property
    def divisible(self) -> bool:
        """Whether one worker may compute the prompt and another one the answer."""
        return bool(self.block_keys) and self.max_tokens > 1


class RunningJob(NamedTuple):
    """One attempt of a job that a worker runs."""

    job_id: str
    attempt: int


class Adapter(NamedTuple):
    """An adapter that a worker serves."""

    name: str
    fingerprint: bytes
    rank: int = 0
    bytes: int = 0
    resident: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker registers."""

    worker_id: str
    address: str
    card: Card
    credits: int
    running: tuple[RunningJob, ...] = ()
    stored_keys: bytes = b""
    adapters: tuple[Adapter, ...] = ()
    role: Role = Role.BOTH


class WorkerLoading(NamedTuple):
    """The progress of a worker that is still starting."""

    worker_id: str
    model: str
    aliases: tuple[str, ...] = ()
    phase: str = ""
    done: int = 0
    total: int = 0


class EndedJob(NamedTuple):
    """A job that its worker no longer runs, and the tokens that it produced in this attempt."""

    job_id: str
    attempt: int
    tokens: int
    placement: int = 0
    """The number of the Assigned that sent the job to the worker; 0 if unknown."""
    handed_off: bool = False
    """The job goes on at the worker of its handoff."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What happened at a worker since its last report. `adapters` is None if nothing about them has changed."""

    steps: int = 0
    step_s: float = 0.0
    running: int = 0
    waiting: int = 0
    prefill_backlog: int = 0
    prefill_rate: float = 0.0
    decode_s: float = 0.0
    free_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    preemptions: int = 0
    ended: tuple[EndedJob, ...] = ()
    stored_keys: bytes = b""
    evicted_keys: bytes = b""
    draining: bool = False
    engine_cpu_s: float = 0.0
    busy: bool = False
    adapters: tuple[Adapter, ...] | None = None


# ---- sent ----


@dataclass(frozen=True, slots=True)
class SchedulerHello:
    """The first message to a gateway or worker."""

    epoch: int


class ServedWorker(NamedTuple):
    """A worker as gateways know it."""

    worker_id: str
    address: str
    credits: int
    adapters: tuple[Adapter, ...] = ()
    role: Role = Role.BOTH


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the workers that serve it; it has no address while its last worker is being replaced."""

    card: Card
    workers: tuple[ServedWorker, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each worker."""
        return tuple(worker.address for worker in self.workers)


@dataclass(frozen=True, slots=True)
class ModelList:
    """All models served, by name, and the workers that are still starting, by id."""

    models: tuple[ServedModel, ...]
    loading: tuple[WorkerLoading, ...] = ()


class Handoff(NamedTuple):
    """Where a job continues after its first token."""

    worker_id: str
    address: str
    placement: int = 0


@dataclass(frozen=True, slots=True)
class Assigned:
    """A job holds a credit of a worker."""

    job_id: str
    attempt: int
    worker_id: str
    address: str
    queue_s: float
    matched_blocks: int
    placement: int
    probation: bool = False
    handoff: Handoff | None = None
    source: str = ""
    retry_after_s: float = 0.0
    """Greater than 0 if the queue is nearly full."""


@dataclass(frozen=True, slots=True)
class Joined:
    """An identical job runs at this worker already."""

    job_id: str
    attempt: int
    worker_id: str
    address: str
    leader_job_id: str
    handoff: Handoff | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A job gets no worker."""

    job_id: str
    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is lost or makes no progress. A hint: gateways judge by their own links whether its jobs must move."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker cannot register."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Suspects:
    """Fingerprints of requests under which workers died."""

    fingerprints: tuple[bytes, ...]


GatewayMessage = SchedulerHello | ModelList | Assigned | Joined | Rejected | WorkerLost | Suspects
WorkerMessage = SchedulerHello | Refused


# ---- commands ----


@dataclass(frozen=True, slots=True)
class ToGateway:
    """Send this message to that gateway."""

    gateway_id: str
    message: GatewayMessage


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send this message to that worker."""

    worker_id: str
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class DropWorker:
    """End the link of that worker, if it still has one: the worker is lost."""

    worker_id: str
    why: str


Command = ToGateway | ToWorker | DropWorker
