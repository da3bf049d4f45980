"""What the service keeps of one job: its identity, its tokens so far and its subscribers. Knows no engine."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from grpc import StatusCode

from services.errors import WeftError
from services.worker.job import Ended, TokenOut
from services.worker.service.gateway_link import GatewayLink

JOB_NOT_FOUND = WeftError(StatusCode.UNAVAILABLE, "JOB_NOT_FOUND", "the generation to join is gone", retryable=True)


class JobState(enum.Enum):
    """Whether the scheduler has placed a job on this worker."""

    TENTATIVE = "tentative"
    """Its gateway sent it before the scheduler's answer. Nobody but that gateway has access to it."""
    CONFIRMED = "confirmed"
    """The scheduler placed it here."""


@dataclass(slots=True, eq=False)
class JobRecord:
    """A job in the engine, or one that ended a short time ago."""

    key: int
    """The engine's handle."""
    job_id: str
    attempt: int
    state: JobState = JobState.CONFIRMED
    placement: int = 0
    """The number of the scheduler's placement; 0 while the job is tentative."""
    prior: Sequence[int] = ()
    """Tokens of the answer that earlier attempts produced."""
    replayable: bool = True
    """`prior` may be sent to others. Not if log-probabilities were requested: those of earlier attempts are unknown."""
    prompt_tokens: int = 0
    """Tokens that the engine received, those of earlier attempts included."""
    cacheable: bool = True
    """Its prompt is looked up in the prefix cache."""
    traceparent: str = ""
    arrived: float = field(default_factory=time.monotonic)
    history: list[TokenOut] = field(default_factory=list)
    """Tokens of this attempt."""
    subscribers: list[tuple["Subscriber", int]] = field(default_factory=list)
    """Links and their stream ids."""
    cancelled_by: tuple["Subscriber", int] | None = None
    """The subscriber that cancelled the job: it still receives the job's cost."""
    ended: Ended | None = None

    @property
    def confirmed(self) -> bool:
        """The scheduler placed it here."""
        return self.state is JobState.CONFIRMED

    @property
    def position(self) -> int:
        """Number of tokens of the answer, those of earlier attempts included."""
        return len(self.prior) + len(self.history)

    def tokens_from(self, position: int) -> list[TokenOut]:
        """The tokens of the answer from a position on. Raises WeftError if some of them are not replayable."""
        if position < len(self.prior) and not self.replayable:
            raise JOB_NOT_FOUND
        earlier = [TokenOut(self.key, place, token) for place, token in enumerate(self.prior)]
        return [token for token in (*earlier, *self.history) if token.position >= position]

    def subscribe(self, link: "Subscriber", stream_id: int) -> None:
        """Sends the job's further tokens to a stream of `link`."""
        self.subscribers.append((link, stream_id))
        link.streams[stream_id] = self


Subscriber: TypeAlias = GatewayLink[JobRecord]
"""A gateway's link, as a subscriber of jobs."""
