"""A circuit breaker for commands to Redis. Knows outcomes and times, never commands.

A closed breaker allows every command. It opens after `failures` failures in a row, or after two or more in a row that
span `span_s` seconds. An open breaker allows one probe every `probe_s` seconds; any success closes it. The clock is an
argument, in seconds.
"""


class Breaker:
    """One breaker. Not thread-safe."""

    def __init__(self, failures: int = 5, span_s: float = 0.1, probe_s: float = 1.0) -> None:
        self._limit = failures
        self._span_s = span_s
        self._probe_s = probe_s
        self._failures = 0
        self._failing_since = 0.0
        self._open_since: float | None = None
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Whether only probes are allowed."""
        return self._open_since is not None

    def allows(self, now: float) -> bool:
        """Whether a command may be sent now. While the breaker is open, True makes the command the probe."""
        if self._open_since is None:
            return True
        if now < self._next_probe:
            return False
        self._next_probe = now + self._probe_s
        return True

    def failed(self, now: float) -> bool:
        """Counts a failure; returns True if it opened the breaker."""
        if self._open_since is not None:
            return False
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        if self._failures < self._limit and (self._failures < 2 or now - self._failing_since < self._span_s):
            return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """Opens the breaker."""
        self._open_since = now
        self._next_probe = now + self._probe_s

    def succeeded(self, now: float) -> float | None:
        """Counts a success; if it closed the breaker, returns for how many seconds that was open, else None."""
        self._failures = 0
        if self._open_since is None:
            return None
        open_s, self._open_since = now - self._open_since, None
        return open_s
