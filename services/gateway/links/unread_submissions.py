"""The submissions that the scheduler has not read yet, by its own count. Knows counts and times, never jobs.

A queue that is full is refused by the scheduler, or here in its place. But a scheduler that needs longer for a job than
the next one takes to arrive never fills its queue: the jobs wait in the connection. So once they wait for long there, a
gateway submits as many jobs as the scheduler reads, and refuses the others.
"""

import math
from collections import deque

from services.errors import WeftError, exhausted
from services.gateway.links.adaptive_limit import AdaptiveLimit

SCHEDULER_OVERLOADED = "SCHEDULER_OVERLOADED"
"""The reason of a refusal."""
BEHIND_S = 0.25
"""Time that a submission may wait before the scheduler reads it. Beside busy processes some wait 0.1 s."""
FEW = 32
"""Unread submissions that are no overload, however old: a slow network delays them, too."""
FEW_OF_A_BURST = 128
"""The same within BURST_S after a rest: clients that start together are no overload of a scheduler that shares its
processor."""
BURST_S = 1.0
STILL_S = 1.0
"""Time without a message of the scheduler, which sends two heartbeats a second, after which it stood still: submissions
were unread for that, and not because there were too many."""
_CALM_S = 1.0
"""Time without an unread submission after which any number may be unread again."""
_RETRY_S = 1.0


class UnreadSubmissions:
    """The submissions of one connection to the scheduler. Pure: the clock is an argument, in seconds."""

    def __init__(self) -> None:
        self._sent_at: deque[float] = deque()
        """When each unread one was sent, the oldest first."""
        self._read = 0
        self._all_read_at = -math.inf
        """Since when none is unread, if so."""
        self._burst_until = 0.0
        self._counted_at = math.inf
        """When the last message has arrived."""
        self._still_until = 0.0
        self._marks = ((0.0, 0), (0.0, 0))
        """Two times not long ago, and how many had been read then."""
        self._limit = AdaptiveLimit()

    def sent(self, now: float) -> None:
        """A job is submitted."""
        if not self._sent_at and now - self._all_read_at > _CALM_S:
            self._limit.forget()
            self._burst_until = now + BURST_S
        self._sent_at.append(now)

    def counted(self, read: int, now: float) -> None:
        """A message has arrived. When the scheduler sent it, it had read this number of submissions."""
        while self._read < read and self._sent_at:
            self._sent_at.popleft()
            self._read += 1
            self._all_read_at = now
        if now - self._counted_at > STILL_S:
            self._still_until = now
        self._counted_at = now
        (since, before), recent = self._marks
        if now - recent[0] >= BEHIND_S:
            self._marks = recent, (now, self._read)
        behind = len(self._sent_at) >= self._few(now) and now - max(self._sent_at[0], self._still_until) > BEHIND_S
        if behind and not self._limit.lowered_within(BEHIND_S, now):  # What a lower limit changes is read later.
            self._limit.lower((self._read - before) / (now - since) * BEHIND_S, now)

    def limited(self, now: float) -> bool:
        """Whether the scheduler was behind in the last seconds; then the number of unread submissions is bounded."""
        return self._limit.active(now)

    def mostly_taken(self, now: float) -> bool:
        """Whether more than half of the submissions are unread that may be."""
        return len(self._sent_at) > self._most(now) / 2

    def refusal(self, now: float) -> WeftError | None:
        """Why a new job is not submitted: the scheduler is behind; None if it is submitted."""
        return scheduler_overloaded() if len(self._sent_at) >= self._most(now) else None

    def _most(self, now: float) -> float:
        return max(self._few(now), self._limit.most(now))

    def _few(self, now: float) -> int:
        """Unread submissions that are no overload."""
        return FEW_OF_A_BURST if now < self._burst_until else FEW


def scheduler_overloaded() -> WeftError:
    """The scheduler is behind with new requests."""
    return exhausted(SCHEDULER_OVERLOADED, "the scheduler is behind with new requests", _RETRY_S)
