"""Limits of one tenant at one gateway: request rate, concurrent answers, tokens. Pure; the clock is an argument."""

from services.errors import exhausted
from services.gateway.access.tenants import Limits

_SLOT_RETRY_S = 1.0
"""Retry delay sent with TOO_MANY_CONCURRENT."""


class Bucket:
    """A token bucket: refilled at `rate` per second, up to `size`. Its level may be negative."""

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate = rate
        self.size = size
        self._level = size
        self._at = now

    def level(self, now: float) -> float:
        """The level at `now`; negative if more was taken than it held."""
        self._level = min(self.size, self._level + (now - self._at) * self.rate)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Takes an amount, also if the level becomes negative."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the level is `amount`; 0 if it is."""
        return max(0.0, (amount - self.level(now)) / self.rate)

    def resized(self, rate: float, size: float, now: float) -> "Bucket":
        """A bucket with another rate and size, and the level of this one."""
        bucket = Bucket(rate, size, now)
        bucket._level = min(size, self.level(now))
        return bucket


class Quota:
    """A tenant's use of its limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.running = 0
        self._limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Applies other limits. What was used stays used."""
        self._limits = limits
        rate, budget = limits.requests_per_second, limits.tokens_per_minute
        self._requests = _resized(self._requests, rate, limits.burst_size, now)
        self._tokens = _resized(self._tokens, budget / 60 if budget else None, budget or 0, now)

    def request(self, now: float) -> None:
        """Counts a request. Raises WeftError if the rate is exceeded."""
        if self._requests is None:
            return
        wait_s = self._requests.wait_s(1, now)
        if wait_s > 0:
            raise exhausted("RATE_LIMITED", "the tenant's request rate is exceeded", wait_s)
        self._requests.take(1, now)

    def begin(self, now: float) -> None:
        """Counts a concurrent answer, until `end`. Raises WeftError if a limit is reached.

        Tokens are charged when the answer ends, so a bucket may go negative; later requests wait until it is refilled.
        """
        most = self._limits.concurrent
        if most is not None and self.running >= most:
            raise exhausted("TOO_MANY_CONCURRENT", "the tenant's limit of concurrent answers is reached", _SLOT_RETRY_S)
        if self._tokens is not None and self._tokens.level(now) <= 0:
            wait_s = max(0.1, self._tokens.wait_s(1, now))
            raise exhausted("TOKENS_EXHAUSTED", "the tenant's tokens per minute are used up", wait_s)
        self.running += 1

    def end(self, tokens: int, now: float) -> None:
        """Ends a concurrent answer, and charges its tokens, those of the prompt included."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens, now)


def _resized(bucket: Bucket | None, rate: float | None, size: float, now: float) -> Bucket | None:
    if rate is None:
        return None
    return Bucket(rate, size, now) if bucket is None else bucket.resized(rate, size, now)
