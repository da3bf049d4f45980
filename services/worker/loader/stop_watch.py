"""Finds stop strings in the text of an answer, for callers that send them to a worker. Knows no jobs.

Gateways of Weft match stop strings themselves; a worker's own tokenizer is used only behind other gateways.
"""

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopWatch:
    """The text of one answer, token by token."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int) -> None:
        """Matches count from the `min_tokens`-th token on."""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._min_tokens = min_tokens
        self._tokens = 0
        self._tail = ""
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_id: int) -> str | None:
        """Adds a token. -> the stop string that it completes, if any; of several the longest."""
        self._tokens += 1
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # Bytes that are no characters: no stop string contains them.
            self._stream, self._tail, text = DecodeStream(skip_special_tokens=True), "", ""
        whole, fresh = self._tail + text, len(self._tail)
        self._tail = whole[max(0, len(whole) - self._longest + 1) :] if self._longest > 1 else ""
        if not text or self._tokens < self._min_tokens:
            return None
        found = [stop for stop in self._stops if whole.find(stop, max(0, fresh - len(stop) + 1)) >= 0]
        return max(found, key=len, default=None)


class StopWatches:
    """Makes StopWatches with a model's tokenizer, which is built when it is first needed (up to about a second)."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer_json = tokenizer_json

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_buffer(self._tokenizer_json)

    def watch(self, stops: Sequence[str], min_tokens: int) -> StopWatch:
        """The watch of one answer."""
        return StopWatch(self._tokenizer, stops, min_tokens)
