"""Stop strings: finds the first one in text that arrives in pieces. Pure; knows neither tokens' ids nor clients."""

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one answer, one token after the other.

    The stop string that is complete first ends the answer, the longest of those that are complete at the same
    character. It counts only from the token on that is the `min_tokens`-th of the answer. What may be the beginning
    of a stop string is held back, and nothing else.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Takes the text that the next token completed; returns what is certain. After it, `found` is the stop string
        that this token completed, if any: the text ends before it."""
        self._tokens += 1
        return self._scan(text) if text else ""

    def flush(self, text: str = "") -> str:
        """Takes the text that was not yet whole when the last token came; returns all that is left."""
        certain = self._scan(text)
        held, self._held = self._held, ""
        return certain + held

    def _scan(self, text: str) -> str:
        text = self._held + text
        fresh = len(self._held)
        self._held = ""
        if self._tokens >= self._min_tokens and (match := self._first(text, fresh)):
            start, self.found = match
            return text[:start]
        hold = self._holds_from(text)
        self._held = text[hold:]
        return text[:hold]

    def _first(self, text: str, fresh: int) -> tuple[int, str] | None:
        """Where the stop string starts that is complete first, at or after the first fresh character."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, fresh - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and best[1:]

    def _holds_from(self, text: str) -> int:
        """From where on the end of the text may be the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
