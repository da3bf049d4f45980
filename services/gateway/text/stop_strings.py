"""Finds the first stop string in text that arrives in pieces. Pure; knows neither token ids nor clients."""

from collections.abc import Sequence


class StopMatcher:
    """Matches the text of one answer, token by token.

    The stop string that is complete first ends the answer; of several that are complete at the same character, the
    longest. Matches count from the `min_tokens`-th token on. Only text that may begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0, keeps: bool = False) -> None:
        """`keeps`: the stop string is part of the answer."""
        self._keeps = keeps
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Adds the text of the next token. -> the text that is certain to be in the answer.

        If the token completes a stop string, `found` is set, and the text ends before or behind the stop string.
        """
        self._tokens += 1
        return self._scan(text) if text else ""

    def flush(self, text: str = "") -> str:
        """Adds the incomplete text after the last token. -> all text that was held back."""
        certain = self._scan(text)
        held, self._held = self._held, ""
        return certain + held

    def _scan(self, text: str) -> str:
        text = self._held + text
        fresh = len(self._held)
        self._held = ""
        if self._tokens >= self._min_tokens and (match := self._first(text, fresh)):
            start, self.found = match
            return text[: start + len(self.found)] if self._keeps else text[:start]
        hold = self._holds_from(text)
        self._held = text[hold:]
        return text[:hold]

    def _first(self, text: str, fresh: int) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first, among those that end in `text[fresh:]`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, fresh - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and best[1:]

    def _holds_from(self, text: str) -> int:
        """Index from which the end of the text may begin a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
