"""How much one tenant may have of one gateway: rate, answers under way, tokens. Pure; the clock is an argument."""

from services.errors import exhausted
from services.gateway.access.tenants import Limits

# How soon a place among the answers under way is worth asking for again.
_SEAT_RETRY_S = 1.0


class Bucket:
    """A token bucket: `rate` drops fall in per second, up to `size`. It may owe: then it first fills up to 0."""

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate = rate
        self.size = size
        self._level = size
        self._at = now

    def level(self, now: float) -> float:
        """What is in it."""
        self._level = min(self.size, self._level + (now - self._at) * self.rate)
        self._at = now
        return self._level

    def take(self, drops: float, now: float) -> None:
        """Takes out drops, even those that are not in it."""
        self._level = self.level(now) - drops

    def wait_s(self, drops: float, now: float) -> float:
        """Seconds until so many are in it; 0 if they are."""
        return max(0.0, (drops - self.level(now)) / self.rate)

    def resized(self, rate: float, size: float, now: float) -> "Bucket":
        """A bucket of another shape with what is in this one."""
        bucket = Bucket(rate, size, now)
        bucket._level = min(size, self.level(now))
        return bucket


class Quota:
    """What a tenant has used of its limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.running = 0
        self._limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Other limits hold from now on; what was used stays used."""
        self._limits = limits
        rate, budget = limits.requests_per_second, limits.tokens_per_minute
        self._requests = _shaped(self._requests, rate, limits.burst_size, now)
        self._tokens = _shaped(self._tokens, budget / 60 if budget else None, budget or 0, now)

    def request(self, now: float) -> None:
        """Counts a request. Raises WeftError if it comes too soon."""
        if self._requests is None:
            return
        wait_s = self._requests.wait_s(1, now)
        if wait_s > 0:
            raise exhausted("RATE_LIMITED", "more requests than this tenant's rate allows", wait_s)
        self._requests.take(1, now)

    def begin(self, now: float) -> None:
        """Takes a place among the answers under way, which `end` gives back. Raises WeftError if there is none.

        An answer's tokens are known at its end: it is let in while any are left, and those that follow pay the rest.
        """
        most = self._limits.concurrent
        if most is not None and self.running >= most:
            raise exhausted(
                "TOO_MANY_CONCURRENT", "as many answers as this tenant may have are under way", _SEAT_RETRY_S
            )
        if self._tokens is not None and self._tokens.level(now) <= 0:
            wait_s = max(0.1, self._tokens.wait_s(1, now))
            raise exhausted("TOKENS_EXHAUSTED", "this tenant's tokens for the minute are used up", wait_s)
        self.running += 1

    def end(self, tokens: int, now: float) -> None:
        """An answer has ended that had so many tokens, its prompt included."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens, now)


def _shaped(bucket: Bucket | None, rate: float | None, size: float, now: float) -> Bucket | None:
    if rate is None:
        return None
    return Bucket(rate, size, now) if bucket is None else bucket.resized(rate, size, now)
