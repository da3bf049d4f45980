"""Limits of one tenant at one gateway: request rate, concurrent answers, tokens. The clock is an argument.

Knows no processes: `usage.py` counts, for this process or for all of the gateway.
"""

from services.errors import exhausted
from services.gateway.access.tenants import Limits
from services.gateway.access.usage import Level, LocalLevel, LocalUsage, Usage

_SLOT_RETRY_S = 1.0
"""Retry delay sent with TOO_MANY_CONCURRENT."""


class Bucket:
    """A token bucket: refilled at `rate` per second, up to `size`. Its level may be negative."""

    def __init__(self, rate: float, size: float, now: float, state: Level | None = None) -> None:
        """`state` of an earlier bucket, whose level is kept up to `size`; without one the bucket is full."""
        self.rate = rate
        self.size = size
        self._state = LocalLevel() if state is None else state
        if not self._state.at:
            self._state.level, self._state.at = size, now

    def level(self, now: float) -> float:
        """The level at `now`; negative if more was taken than it held."""
        state = self._state
        state.level = min(self.size, state.level + (now - state.at) * self.rate)
        state.at = now
        return state.level

    def take(self, amount: float, now: float) -> None:
        """Takes an amount, also if the level becomes negative."""
        self._state.level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the level is `amount`; 0 if it is."""
        return max(0.0, (amount - self.level(now)) / self.rate)

    def resized(self, rate: float, size: float, now: float) -> "Bucket":
        """A bucket with another rate and size, and the level of this one."""
        level = self.level(now)
        bucket = Bucket(rate, size, now, self._state)
        self._state.level = min(size, level)
        return bucket


class Quota:
    """A tenant's use of its limits."""

    def __init__(self, limits: Limits, now: float, usage: Usage | None = None) -> None:
        """`usage` is counted beside other processes if they share it."""
        self._usage = usage or LocalUsage()
        self._limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(limits, now)

    @property
    def running(self) -> int:
        """Concurrent answers of this process."""
        return self._usage.own_running

    def change(self, limits: Limits, now: float) -> None:
        """Applies other limits. What was used stays used."""
        self._limits = limits
        rate, budget = limits.requests_per_second, limits.tokens_per_minute
        usage = self._usage
        with usage.locked():
            self._requests = _resized(self._requests, rate, limits.burst_size, now, usage.requests)
            self._tokens = _resized(self._tokens, budget / 60 if budget else None, budget or 0, now, usage.tokens)

    def request(self, now: float) -> None:
        """Counts a request. Raises WeftError if the rate is exceeded."""
        if self._requests is None:
            return
        with self._usage.locked():
            wait_s = self._requests.wait_s(1, now)
            if wait_s <= 0:
                self._requests.take(1, now)
        if wait_s > 0:
            raise exhausted("RATE_LIMITED", "the tenant's request rate is exceeded", wait_s)

    def begin(self, now: float) -> None:
        """Counts a concurrent answer, until `end`. Raises WeftError if a limit is reached.

        Tokens are charged when the answer ends, so a bucket may go negative; later requests wait until it is refilled.
        """
        if self._limits.concurrent is None and self._tokens is None:
            self._usage.add_running(1)
            return
        with self._usage.locked():
            self._check(now)
            self._usage.add_running(1)

    def _check(self, now: float) -> None:
        most = self._limits.concurrent
        if most is not None and self._usage.running >= most:
            raise exhausted("TOO_MANY_CONCURRENT", "the tenant's limit of concurrent answers is reached", _SLOT_RETRY_S)
        if self._tokens is not None and self._tokens.level(now) <= 0:
            wait_s = max(0.1, self._tokens.wait_s(1, now))
            raise exhausted("TOKENS_EXHAUSTED", "the tenant's tokens per minute are used up", wait_s)

    def end(self, tokens: int, now: float) -> None:
        """Ends a concurrent answer, and charges its tokens, those of the prompt included."""
        self._usage.add_running(-1)
        if self._tokens is not None:
            with self._usage.locked():
                self._tokens.take(tokens, now)


def _resized(bucket: Bucket | None, rate: float | None, size: float, now: float, state: Level) -> Bucket | None:
    if rate is None:
        return None
    return Bucket(rate, size, now, state) if bucket is None else bucket.resized(rate, size, now)
