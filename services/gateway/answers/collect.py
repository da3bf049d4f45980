"""Collects the parts of an answer into one reply. Knows only messages of the public API."""

from collections.abc import Iterable, MutableSequence

from protos import inference_pb2 as api
from services.gateway.answers.call import Delta, Part


class Collector:
    """Builds a CompleteResponse of deltas and the receipt."""

    def __init__(self) -> None:
        self.response = api.CompleteResponse()
        self._texts: list[list[str]] = []

    async def add(self, part: Part) -> None:
        """Adds the next part. The receipt completes the reply."""
        if isinstance(part, api.Receipt):
            self._close(part)
        elif isinstance(part, api.PromptEcho):
            self.response.prompt.MergeFrom(part)
            self.response.prompt.position = 0
        else:
            self._add_delta(part)

    def _add_delta(self, delta: Delta) -> None:
        choices = self.response.choices
        while len(choices) <= delta.index:
            choices.add(index=len(choices))
            self._texts.append([])
        choice = choices[delta.index]
        self._texts[delta.index].append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        add_calls(choice.tool_calls, delta.tool_calls)
        if delta.finish_reason:
            choice.finish_reason = delta.finish_reason
            if delta.stop_string is not None:
                choice.stop_string = delta.stop_string
            elif delta.stop_token_id is not None:
                choice.stop_token_id = delta.stop_token_id

    def _close(self, receipt: api.Receipt) -> None:
        for choice, texts in zip(self.response.choices, self._texts, strict=True):
            choice.text = "".join(texts)
        self.response.receipt.CopyFrom(receipt)


def add_calls(calls: MutableSequence[api.ToolCall], deltas: Iterable[api.ToolCallDelta]) -> None:
    """Adds parts of tool calls to the calls of an answer."""
    for part in deltas:
        if part.index == len(calls):
            calls.append(api.ToolCall(id=part.id, name=part.name))
        calls[part.index].arguments += part.arguments
