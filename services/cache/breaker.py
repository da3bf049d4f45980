"""Whether Redis is worth asking: a circuit breaker. Knows outcomes and times, never what was asked.

Closed, everything may ask. After `failures` failures in a row, or fewer that span `patience_s`, it opens: one probe
each `probe_s` may ask, and any success closes it. The clock is an argument, in seconds.
"""


class Breaker:
    """The state of one breaker. Not for use from several threads."""

    def __init__(self, failures: int = 5, patience_s: float = 0.1, probe_s: float = 1.0) -> None:
        self._limit = failures
        self._patience_s = patience_s
        self._probe_s = probe_s
        self._failures = 0
        self._failing_since = 0.0
        self._open_since: float | None = None
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Only probes may ask."""
        return self._open_since is not None

    def allows(self, now: float) -> bool:
        """Whether to ask now. While open, True makes the asker the probe."""
        if self._open_since is None:
            return True
        if now < self._next_probe:
            return False
        self._next_probe = now + self._probe_s
        return True

    def failed(self, now: float) -> bool:
        """Counts a failure. True if it opened the breaker."""
        if self._open_since is not None:
            return False
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        if self._failures < self._limit and (self._failures < 2 or now - self._failing_since < self._patience_s):
            return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """Opens at once."""
        self._open_since = now
        self._next_probe = now + self._probe_s

    def succeeded(self, now: float) -> float | None:
        """Counts a success. If it closed the breaker: for how many seconds it had been open."""
        self._failures = 0
        if self._open_since is None:
            return None
        open_s, self._open_since = now - self._open_since, None
        return open_s
