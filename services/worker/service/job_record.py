"""What the service keeps of one job: its identity, its tokens so far and its subscribers. Knows no engine."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from grpc import StatusCode

from services.errors import WeftError
from services.worker.job import Ended, EndReason, Job, TokenOut
from services.worker.service.gateway_link import GatewayLink

JOB_NOT_FOUND = WeftError(StatusCode.UNAVAILABLE, "JOB_NOT_FOUND", "the generation to join is gone", retryable=True)


class JobState(enum.Enum):
    """Whether the scheduler has placed a job on this worker."""

    TENTATIVE = "tentative"
    """Its gateway sent it before the scheduler's answer. Only that gateway has access to it."""
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
    request: Job | None = None
    """What the engine was given; None for a job that it refused."""
    prior: Sequence[int] = ()
    """Tokens of the answer that earlier attempts produced."""
    replayable: bool = True
    """`prior` may be sent to others. Not if log-probabilities were requested: those of earlier attempts are unknown."""
    joinable: bool = True
    """Others may subscribe to it. Not if it reports log-probabilities of its prompt, which are not kept."""
    prompt_tokens: int = 0
    """Tokens that the engine received, those of earlier attempts included."""
    cacheable: bool = True
    """Its prompt is looked up in the prefix cache."""
    traceparent: str = ""
    arrived: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    """Tokens of this attempt. Numbers alone: an object for each would keep the garbage collector busy."""
    logprobs: list[tuple[float, list[tuple[int, float]] | None]] = field(default_factory=list)
    """Their log-probabilities and most likely tokens, if they were requested."""
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
        return len(self.prior) + len(self.token_ids)

    @property
    def handed_off(self) -> bool:
        """It has ended here, and goes on at another worker."""
        job, ended = self.request, self.ended
        if job is None or ended is None or not job.handoff or ended.reason is not EndReason.LENGTH:
            return False
        return self.position < job.params.max_tokens

    def tokens_from(self, position: int) -> list[TokenOut]:
        """The tokens of the answer from a position on. Raises WeftError if some of them are not replayable."""
        if not self._replays_from(position):
            raise JOB_NOT_FOUND
        tokens = [TokenOut(self.key, place, token) for place, token in enumerate([*self.prior, *self.token_ids])]
        for place, (logprob, top) in enumerate(self.logprobs, len(self.prior)):
            tokens[place].logprob, tokens[place].top = logprob, top
        return tokens[position:]

    def same_request(self, job: Job) -> bool:
        """Whether a job is the same request, whatever part of its answer it has."""
        mine = self.request
        return mine is not None and _identity(mine) == _identity(job)

    def continues(self, answer: Sequence[int]) -> bool:
        """Whether a request that has these tokens of the same answer can receive the further ones of this job."""
        if self.request is None or self.request.encode is not None:  # Vectors are not replayed.
            return False
        tokens = [*self.prior, *self.token_ids]
        return self.cancelled_by is None and tokens[: len(answer)] == answer and self._replays_from(len(answer))

    def _replays_from(self, position: int) -> bool:
        return self.joinable and (position >= len(self.prior) or self.replayable)

    def add(self, token: TokenOut) -> None:
        """Keep a new token of this attempt."""
        self.token_ids.append(token.token_id)
        if token.logprob is not None:
            self.logprobs.append((token.logprob, token.top))

    def subscribe(self, link: "Subscriber", stream_id: int) -> None:
        """Sends the job's further tokens to a stream of `link`."""
        self.subscribers.append((link, stream_id))
        link.streams[stream_id] = self


def _identity(job: Job) -> tuple[bytes, Job]:
    """The job without what may differ between two submissions of one request, and the fingerprint of its adapter."""
    adapter = job.adapter.fingerprint if job.adapter is not None else b""
    prompt = job.token_ids[: job.prompt_len]
    same = replace(job, key=0, token_ids=prompt, adapter=None, deadline=None, priority=0, speculation=None)
    return adapter, replace(same, handoff=False, source="")


Subscriber: TypeAlias = GatewayLink[JobRecord]
"""A gateway's link, as a subscriber of jobs."""
