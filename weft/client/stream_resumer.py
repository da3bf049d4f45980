"""Makes one stream of several attempts at it, each token and character once. Knows positions, no calls and no time."""

from collections.abc import Iterable

import grpc

from protos import inference_pb2 as api
from weft.client.errors import WeftError


class StreamResumer:
    """Keeps what the consumer has received of each continuation, and finds what of a repeated stream is new.

    Each attempt replays the answer from its start and may divide it into other messages.
    """

    def __init__(self) -> None:
        self._received: dict[int, _Received] = {}

    def begin_attempt(self) -> None:
        """Starts a new attempt, whose stream begins at position 0 and at the first character."""
        for received in self._received.values():
            received.begin_attempt()

    def unseen(self, delta: api.Delta) -> api.Delta | None:
        """The part of `delta` that the consumer has not received, or None if it has all of it.

        Raises WeftError if the repetition differs from what was received: two answers are never joined.
        """
        received = self._received.setdefault(delta.index, _Received())
        known = received.count_known(delta)
        text, calls = received.take_text(delta.text), received.take_calls(delta.tool_calls)
        if received.ended or not (text or calls or delta.finish_reason or known < len(delta.token_ids)):
            return None
        received.token_ids.extend(delta.token_ids[known:])
        received.ended = bool(delta.finish_reason)
        repeats = known or len(text) < len(delta.text) or calls != list(delta.tool_calls)
        return _without_start(delta, known, text, calls) if repeats else delta


def _without_start(delta: api.Delta, known: int, text: str, calls: list[api.ToolCallDelta]) -> api.Delta:
    result = api.Delta()
    result.CopyFrom(delta)
    del result.tool_calls[:]
    result.tool_calls.extend(calls)
    result.text = text
    result.position = delta.position + known
    del result.token_ids[:known]
    del result.logprobs[:known]
    return result


class _Received:
    """What the consumer has received of one continuation."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.chars = 0
        self.replayed_chars = 0
        self.ended = False
        self._calls: dict[int, int] = {}
        """Characters of the arguments of each call."""
        self._replayed: dict[int, int] = {}

    def begin_attempt(self) -> None:
        """A stream begins that repeats all from its start."""
        self.replayed_chars = 0
        self._replayed.clear()

    def count_known(self, delta: api.Delta) -> int:
        """The number of the delta's tokens that are a repetition. Raises WeftError if they differ or leave a gap."""
        at, held = delta.position, len(self.token_ids)
        known = min(max(held - at, 0), len(delta.token_ids))
        if delta.token_ids and (at > held or self.token_ids[at : at + known] != delta.token_ids[:known]):
            raise WeftError(grpc.StatusCode.DATA_LOSS, "a repeated stream is not the same", reason="REPLAY_DIFFERS")
        return known

    def take_text(self, text: str) -> str:
        """The new part of a piece of text, found by the number of characters that came before it in this attempt."""
        skip = min(max(self.chars - self.replayed_chars, 0), len(text))
        self.replayed_chars += len(text)
        self.chars = max(self.chars, self.replayed_chars)
        return text[skip:]

    def take_calls(self, parts: Iterable[api.ToolCallDelta]) -> list[api.ToolCallDelta]:
        """The new parts of tool calls, found as those of the text."""
        new = []
        for part in parts:
            begins = part.index not in self._calls
            known, replayed = self._calls.get(part.index, 0), self._replayed.get(part.index, 0)
            arguments = part.arguments[max(known - replayed, 0) :]
            self._replayed[part.index] = replayed + len(part.arguments)
            self._calls[part.index] = max(known, self._replayed[part.index])
            if begins or arguments:
                first = {"id": part.id, "name": part.name} if begins else {}
                new.append(api.ToolCallDelta(index=part.index, arguments=arguments, **first))
        return new
