"""The seam between doors and answers: one request in the terms of no protocol. Knows neither gRPC nor HTTP."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from protos import inference_pb2 as api
from services.gateway.access.authorizer import Credentials


@dataclass(slots=True)
class Delta:
    """What is new of one continuation: the fields of weft.v1's Delta, which costs several times as much to make."""

    index: int
    position: int = 0
    attempt: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[api.PositionLogprobs] = ()
    tool_calls: Sequence[api.ToolCallDelta] = ()
    finish_reason: "api.FinishReason.ValueType" = api.FINISH_REASON_UNSPECIFIED
    stop_string: str | None = None
    stop_token_id: int | None = None
    waiting: bool = False


Part: TypeAlias = "Delta | api.PromptEcho | api.Receipt"
"""A part of an answer as plain values, which each door writes in its own form."""
Deliver = Callable[[Part], Awaitable[object]]
"""Sends one part to the client: deltas, and last the receipt. Returns once the client can take the next one."""
Put = Callable[[Part], bool]
"""Sends one part at once. -> False, and nothing is sent, if the client cannot take it yet."""
PutText = Callable[[str], bool]
"""Sends text of the only continuation at once, as `Put` does a delta."""
Accept = Callable[[], Awaitable[object]]
"""Informs the client that a worker has accepted the request."""
Finish = Callable[[api.Receipt], None]
"""Takes the receipt, exactly once, however the call ends."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as a door received it. To cancel the call, a door cancels the task that serves it."""

    method: str
    """Method of the public API, "Generate" or "Complete": what a tenant's key may permit."""
    protocol: str
    """Name of the door's protocol in traces, such as "grpc"."""
    request: api.GenerateRequest
    credentials: Credentials
    deliver: Deliver
    finish: Finish
    put: Put | None = None
    """Tried before `deliver`, and as soon as tokens arrive, without a change of task."""
    put_text: PutText | None = None
    """Tried before `put`, if the client gets nothing of a token but its text: it costs half as much."""
    whole: bool = False
    """The client receives its answer when it has ended: until then nothing is delivered."""
    remaining_s: float | None = None
    """Seconds until the client's deadline; None for no deadline."""
    traceparent: str = ""
    """W3C trace context of the client."""
    accept: Accept | None = None
    """Called at most once, and only before the first delivery. A call that is refused was never accepted."""
