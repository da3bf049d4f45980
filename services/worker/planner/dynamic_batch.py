"""Dynamic batching: which texts an encoder computes next, and when. Pure: the clock is an argument. Knows no tokens.

A batch is computed at once when it is full, and else when its oldest text has waited for the longest wait, or when
nothing more is expected: the next arrival is overdue, or is expected after that moment, or as many jobs wait as the
last batch had. Most callers send a text after the answer to the last one, so a lone caller's text is computed at once.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_WEIGHT = 0.2
"""Weight of a new gap between arrivals in their moving average."""
_PATIENCE = 2.0
"""Mean gaps after which the next arrival is overdue."""


class WaitingText(NamedTuple):
    """A text of a job that waits."""

    key: int
    """Its job."""
    place: int
    """Its place in the job."""
    tokens: int
    arrived: float


class DynamicBatch:
    """The texts that wait. No operation looks at all of them: with many, batches would take longer, and more would
    wait."""

    def __init__(self, most_tokens: int, most_texts: int, longest_wait_s: float) -> None:
        """most_tokens: of a batch; no text has more."""
        self.most_tokens, self.most_texts, self.longest_wait_s = most_tokens, most_texts, longest_wait_s
        self._queues: dict[int, OrderedDict[int, deque[WaitingText]]] = {}
        """For each priority, the texts of its jobs in the order of their arrival; none is empty."""
        self._priorities: dict[int, int] = {}
        """Of each job that has texts here."""
        self._texts = self._tokens = 0
        self._last_jobs = math.inf
        """Jobs that had texts in the last batch."""
        self._last_arrival = -math.inf
        self._gap_s = longest_wait_s
        """The mean of the gaps between arrivals, none of which counts for more than the longest wait."""

    def __len__(self) -> int:
        return self._texts

    @property
    def tokens(self) -> int:
        """Tokens of all texts that wait."""
        return self._tokens

    @property
    def is_full(self) -> bool:
        """Whether the next batch has no room for more."""
        return self._tokens >= self.most_tokens or self._texts >= self.most_texts

    def add(self, key: int, texts: Iterable[WaitingText], now: float, priority: int = 0) -> None:
        """The texts of a job, at least one, have arrived. Those of the highest priority are computed first."""
        waiting = deque(texts)
        assert all(0 < text.tokens <= self.most_tokens for text in waiting), waiting
        assert waiting, key
        assert key not in self._priorities, key
        self._queues.setdefault(priority, OrderedDict())[key] = waiting
        self._priorities[key] = priority
        self._count(waiting, 1)
        gap_s = min(now - self._last_arrival, self.longest_wait_s)
        self._gap_s += _WEIGHT * (gap_s - self._gap_s)
        self._last_arrival = now

    def drop(self, key: int) -> None:
        """A job has ended: none of its texts is computed."""
        if key in self._priorities:
            self._count(self._queues[self._priorities[key]][key], -1)
            self._remove(key)

    def wait_s(self, now: float) -> float:
        """Seconds to wait for more texts; 0: a batch is to be computed now; infinite: no text waits."""
        if not self._texts:
            return math.inf
        if self.is_full or len(self._priorities) >= self._last_jobs:
            return 0.0
        latest = min(texts[0].arrived for texts in self._in_order()) + self.longest_wait_s
        if self._last_arrival + self._gap_s >= latest:
            return 0.0
        return max(0.0, min(latest, self._last_arrival + _PATIENCE * self._gap_s) - now)

    def take(self) -> list[WaitingText]:
        """The next batch: texts in their order, and behind one that does not fit those that do, as long as no more are
        passed over than a batch may have."""
        batch: list[WaitingText] = []
        room, passes, emptied = self.most_tokens, self.most_texts, []
        for texts in self._in_order():
            passed = []
            while texts and room and passes and len(batch) < self.most_texts:
                text = texts.popleft()
                if text.tokens <= room:
                    batch.append(text)
                    room -= text.tokens
                else:
                    passed.append(text)
                    passes -= 1
            if not texts and not passed:
                emptied.append(batch[-1].key)
            texts.extendleft(reversed(passed))
            if not (room and passes and len(batch) < self.most_texts):
                break
        for key in emptied:
            self._remove(key)
        self._count(batch, -1)
        self._last_jobs = len({text.key for text in batch})
        return batch

    def _in_order(self) -> Iterator[deque[WaitingText]]:
        """The texts of each job, in the order in which they are computed."""
        for priority in sorted(self._queues, reverse=True):
            yield from self._queues[priority].values()

    def _remove(self, key: int) -> None:
        """The job has no texts here any more."""
        priority = self._priorities.pop(key)
        queue = self._queues[priority]
        del queue[key]
        if not queue:
            del self._queues[priority]

    def _count(self, texts: Iterable[WaitingText], sign: int) -> None:
        for text in texts:
            self._texts += sign
            self._tokens += sign * text.tokens
