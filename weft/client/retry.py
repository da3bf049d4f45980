"""Decides which failures are retried, and when. Knows no call."""

import random
from collections.abc import Callable

import grpc

from weft.client.errors import WeftError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# A server that shuts down ends its calls with CANCELLED, also for callers that did not cancel.
_RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class RetryState:
    """The attempts at one call: at most `retries` consecutive failures without progress, all before `deadline`."""

    def __init__(self, retries: int, deadline: float | None, draw: Callable[[], float] = random.random) -> None:
        self._retries = retries
        self._deadline = deadline
        self._draw = draw
        self._failures = 0

    def progressed(self) -> None:
        """Resets the count of failures: the attempt has delivered something new."""
        self._failures = 0

    def remaining_s(self, now: float) -> float | None:
        """Seconds until the deadline, None without one. Raises WeftError when it has passed."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise WeftError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed", reason="DEADLINE")
        return self._deadline - now

    def pause_s(self, error: WeftError, now: float) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there is none.

        Exponential backoff with jitter of one half, so that the clients of a restarted server do not all reconnect at
        one instant, and never sooner than the server asks for.
        """
        if error.code not in _RETRYABLE or self._failures >= self._retries:
            raise error
        pause: float = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        pause = max(pause * (0.5 + 0.5 * self._draw()), error.retry_after_s)
        if self._deadline is not None and now + pause >= self._deadline:
            raise error
        self._failures += 1
        return pause
