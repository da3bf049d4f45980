"""The parts of an answer as plain values, which each door writes in its own form. Knows no door and no connection."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from protos import inference_pb2 as api


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


def message(part: Part) -> api.GenerateResponse:
    """The part as a message of weft.v1."""
    if isinstance(part, api.Receipt):
        return api.GenerateResponse(receipt=part)
    if isinstance(part, api.PromptEcho):
        return api.GenerateResponse(prompt=part)
    response = api.GenerateResponse()
    delta = response.delta  # Filled in place: the constructor would copy it.
    delta.index, delta.position, delta.attempt = part.index, part.position, part.attempt
    delta.token_ids.extend(part.token_ids)
    delta.text = part.text
    if part.logprobs:
        delta.logprobs.extend(part.logprobs)
    if part.tool_calls:
        delta.tool_calls.extend(part.tool_calls)
    if part.finish_reason:
        delta.finish_reason = part.finish_reason
        if part.stop_string is not None:
            delta.stop_string = part.stop_string
        elif part.stop_token_id is not None:
            delta.stop_token_id = part.stop_token_id
    if part.waiting:
        delta.waiting = True
    return response
