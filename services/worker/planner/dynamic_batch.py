"""Dynamic batching: which texts an encoder computes next, and when. Pure: the clock is an argument. Knows no tokens.

A batch is computed at once when it is full, and else when its oldest text has waited for the longest wait, or when
nothing more is expected: the next arrival is overdue, or is expected after that moment.
"""

import math
from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

_WEIGHT = 0.2
"""Weight of a new gap between arrivals in their moving average."""
_PATIENCE = 2.0
"""Mean gaps after which the next arrival is overdue."""


class WaitingText(NamedTuple):
    """A text of a job that waits. Texts are in the order in which they are computed."""

    rank: int
    """Minus the priority of its job."""
    number: int
    """The number of its job's arrival."""
    place: int
    """Its place in the job."""
    key: int
    """Its job."""
    tokens: int
    arrived: float


class DynamicBatch:
    """The texts that wait."""

    def __init__(self, most_tokens: int, most_texts: int, longest_wait_s: float) -> None:
        """most_tokens: of a batch; no text has more."""
        self.most_tokens, self.most_texts, self.longest_wait_s = most_tokens, most_texts, longest_wait_s
        self._waiting: list[WaitingText] = []
        self._tokens = 0
        self._last_arrival = -math.inf
        self._gap_s = longest_wait_s
        """The mean of the gaps between arrivals, none of which counts for more than the longest wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Tokens of all texts that wait."""
        return self._tokens

    @property
    def is_full(self) -> bool:
        """Whether the next batch has no room for more."""
        return self._tokens >= self.most_tokens or len(self._waiting) >= self.most_texts

    def add(self, texts: Iterable[WaitingText], now: float) -> None:
        """The texts of a job have arrived."""
        for text in texts:
            assert 0 < text.tokens <= self.most_tokens, text
            insort(self._waiting, text)
            self._tokens += text.tokens
        gap_s = min(now - self._last_arrival, self.longest_wait_s)
        self._gap_s += _WEIGHT * (gap_s - self._gap_s)
        self._last_arrival = now

    def drop(self, key: int) -> None:
        """A job has ended: none of its texts is computed."""
        self._waiting = [text for text in self._waiting if text.key != key]
        self._tokens = sum(text.tokens for text in self._waiting)

    def wait_s(self, now: float) -> float:
        """Seconds to wait for more texts; 0: a batch is to be computed now; infinite: no text waits."""
        if not self._waiting:
            return math.inf
        if self.is_full:
            return 0.0
        latest = min(text.arrived for text in self._waiting) + self.longest_wait_s
        if self._last_arrival + self._gap_s >= latest:
            return 0.0
        return max(0.0, min(latest, self._last_arrival + _PATIENCE * self._gap_s) - now)

    def take(self) -> list[WaitingText]:
        """The next batch: texts in their order, and behind one that does not fit those that do."""
        batch: list[WaitingText] = []
        left: list[WaitingText] = []
        room = self.most_tokens
        for place, text in enumerate(self._waiting):
            if room == 0 or len(batch) == self.most_texts:
                left += self._waiting[place:]
                break
            if text.tokens <= room:
                batch.append(text)
                room -= text.tokens
            else:
                left.append(text)
        self._waiting, self._tokens = left, self._tokens - (self.most_tokens - room)
        return batch
