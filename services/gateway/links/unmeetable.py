"""Requests whose deadline cannot be met, as far as the refusal of another one shows. Knows sizes and times, no tokens.

Whether an answer can end before its deadline is the scheduler's decision, and a refusal costs it and the gateway as
much as a placement. Under overload most requests are like the one before them: those that ask for no less in no more
time than one that the scheduler has just refused are refused where they arrive.
"""

from itertools import takewhile
from typing import NamedTuple

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError

REASON = "DEADLINE_UNMEETABLE"
"""The scheduler's reason."""
_HOLD, _MOST_HOLD_S = 1 / 30, 0.2
"""For which part of its time, and for how long at the most, a refusal stands for others. A place that becomes free
meanwhile is taken soon after: the queue is that much shorter."""
_MORE_TIME = 1.05
"""How many times the refused request's time another one may have: the forecast is no more exact than that."""
_FEW_BYTES = 256
"""Bytes of a prompt that make no difference."""

Place = tuple[str, str]
"""What decides about a request's place in a queue, beside its priority: tenant and model."""


class _Demand(NamedTuple):
    """What a request asks for. Its prompt is not kept."""

    priority: int
    bounded: bool
    """It has a limit of its own for the answer, `max_tokens`."""
    max_tokens: int
    n: int
    """Number of continuations."""
    prompt_form: str | None
    prompt_bytes: int
    """Only those of one form are compared: a token's id has 1 to 5 bytes, its text any number."""

    @classmethod
    def of(cls, request: api.GenerateRequest) -> "_Demand":
        """The demand of a request."""
        sampling, prompt = request.sampling, request.prompt
        return cls(
            priority=request.priority,
            bounded=sampling.HasField("max_tokens"),
            max_tokens=sampling.max_tokens,
            n=max(1, request.n),
            prompt_form=prompt.WhichOneof("form"),
            prompt_bytes=prompt.ByteSize(),
        )

    def covers(self, other: "_Demand") -> bool:
        """Whether it has no shorter answer and prompt than another one, no fewer answers, and no higher priority."""
        return (
            self.priority <= other.priority
            and self.bounded == other.bounded
            and self.max_tokens >= other.max_tokens
            and self.n >= other.n
            and self.prompt_form == other.prompt_form
            and self.prompt_bytes >= other.prompt_bytes - _FEW_BYTES
        )


class _Refused(NamedTuple):
    """A request that the scheduler has refused."""

    at: float
    left_s: float
    """Seconds that it had left."""
    demand: _Demand
    failure: mesh.Failure


class UnmeetableDeadlines:
    """The last refusal of each tenant and model. Pure: the clock is an argument, in seconds."""

    def __init__(self) -> None:
        self._refused: dict[Place, _Refused] = {}
        """In the order of their time. Those that stand for no other request any more are dropped with the next note."""

    def note(self, place: Place, request: api.GenerateRequest, left_s: float, error: WeftError, now: float) -> None:
        """The scheduler has refused a request that has `left_s` seconds left."""
        past = takewhile(lambda each: now - self._refused[each].at > _MOST_HOLD_S, self._refused)
        for each in (*past, place):
            self._refused.pop(each, None)
        self._refused[place] = _Refused(now, left_s, _Demand.of(request), error.failure())

    def refusal(self, place: Place, request: api.GenerateRequest, left_s: float, now: float) -> WeftError | None:
        """Why a new request with `left_s` seconds is not submitted; None if it is."""
        refused = self._refused.get(place)
        if refused is None or now - refused.at > min(_MOST_HOLD_S, _HOLD * refused.left_s):
            return None
        if left_s > _MORE_TIME * refused.left_s or not _Demand.of(request).covers(refused.demand):
            return None
        return WeftError.from_failure(refused.failure)
