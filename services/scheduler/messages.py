"""What the scheduler hears and says, as plain values. Knows neither sockets nor protobuf."""

from dataclasses import dataclass, field
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
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something was refused, ready for the client.

    `retry_after_s` is 0 if coming again makes no sense.
    """

    code: Code
    reason: str
    message: str
    retry_after_s: float = 0.0
    field: str = ""


# ---- heard ----


@dataclass(frozen=True, slots=True)
class Card:
    """What tells one model from another; `detail` is the whole card, repeated to gateways and never read here."""

    name: str
    aliases: tuple[str, ...] = ()
    fingerprint: bytes = b""
    block_size: int = 16
    bundle_digest: bytes = b""
    detail: object = None

    def conflicts_with(self, other: "Card") -> bool:
        """Two workers with these cards cannot continue each other's jobs."""
        mine = (self.fingerprint, self.block_size, self.bundle_digest)
        return mine != (other.fingerprint, other.block_size, other.bundle_digest)


@dataclass(frozen=True, slots=True)
class Submit:
    """A job looks for a worker. Fields as in `weft.v1.Submit`; `deadline_s` is None for none."""

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


class JobRef(NamedTuple):
    """One attempt of a job."""

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker registers. Fields as in `weft.v1.WorkerHello`."""

    worker_id: str
    address: str
    card: Card
    credits: int
    running: tuple[JobRef, ...] = ()
    stored_keys: bytes = b""


class Loading(NamedTuple):
    """How far a worker's start is that will join. Fields as in `weft.v1.WorkerLoading`."""

    worker_id: str
    model: str
    aliases: tuple[str, ...] = ()
    phase: str = ""
    done: int = 0
    total: int = 0


class Ended(NamedTuple):
    """A job that its worker no longer runs, and the tokens it produced in this attempt."""

    job_id: str
    attempt: int
    tokens: int
    placement: int = 0
    """Of the answer that sent it there; 0 if it came without one."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened at a worker since its last report. Fields as in `weft.v1.WorkerReport`."""

    steps: int = 0
    step_s: float = 0.0
    running: int = 0
    waiting: int = 0
    prefill_backlog: int = 0
    prefill_rate: float = 0.0
    decode_s: float = 0.0
    ended: tuple[Ended, ...] = ()
    stored_keys: bytes = b""
    evicted_keys: bytes = b""
    draining: bool = False


# ---- said ----


@dataclass(frozen=True, slots=True)
class Hello:
    """First word to a gateway or worker."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Served:
    """A model and the addresses of the workers that serve it; none while its last worker is being replaced."""

    card: Card
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Models:
    """All models served, by name, and the workers that will serve some."""

    models: tuple[Served, ...]
    loading: tuple[Loading, ...] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    """A job has a worker and one of its credits."""

    job_id: str
    attempt: int
    worker_id: str
    address: str
    queue_s: float
    matched_blocks: int
    placement: int


@dataclass(frozen=True, slots=True)
class Joined:
    """An identical job runs already at this worker."""

    job_id: str
    attempt: int
    worker_id: str
    address: str
    leader_job_id: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A job finds no worker."""

    job_id: str
    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is lost: jobs that were there need a next attempt."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker cannot join."""

    failure: Failure


GatewayMessage = Hello | Models | Assigned | Joined | Rejected | WorkerLost
WorkerMessage = Hello | Refused


# ---- commands ----


@dataclass(frozen=True, slots=True)
class ToGateway:
    """Send this to that gateway."""

    gateway_id: str
    message: GatewayMessage


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send this to that worker."""

    worker_id: str
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class DropWorker:
    """That worker is lost: end its link if there still is one."""

    worker_id: str
    why: str


Command = ToGateway | ToWorker | DropWorker


@dataclass(slots=True)
class Counters:
    """What happened since the scheduler began."""

    submitted: int = 0
    assigned: int = 0
    joined: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    withdrawn: int = 0
    ended: int = 0
    tokens: int = 0
    prompt_blocks: int = 0
    matched_blocks: int = 0
    workers_attached: int = 0
    workers_lost: int = 0
