"""How many may wait at the scheduler: fewer after each sign that too many do, and more with time. Knows counts and
times, never jobs.

As several gateways lower their limits in proportion and raise them by equal steps, the limits become equal.
"""

import math

_GROWTH_PER_S = 32.0
"""By how many the limit grows in a second. A scheduler that marks no placements refuses about as many for each gateway.
Where the jobs of another gateway have filled the queue, this gateway submits the next one after 1/32 s."""
_FORGET_S = 10.0
"""Time without a sign after which any number may wait again."""


class AdaptiveLimit:
    """A limit that falls and grows. Pure: the clock is an argument, in seconds."""

    def __init__(self) -> None:
        self._most = math.inf
        """Most that might wait when the limit was lowered, at `_lowered_at`."""
        self._lowered_at = -math.inf

    def lower(self, most: float, now: float) -> None:
        """Too many wait: from now on at most this number may, or fewer."""
        self._most = min(self.most(now), most)
        self._lowered_at = now

    def forget(self) -> None:
        """Any number may wait."""
        self._lowered_at = -math.inf

    def lowered_within(self, seconds: float, now: float) -> bool:
        """Whether the limit was lowered in the last seconds."""
        return now - self._lowered_at < seconds

    def active(self, now: float) -> bool:
        """Whether there is a limit: it was lowered not long ago."""
        return self.lowered_within(_FORGET_S, now)

    def most(self, now: float) -> float:
        """How many may wait."""
        return self._most + _GROWTH_PER_S * (now - self._lowered_at) if self.active(now) else math.inf
