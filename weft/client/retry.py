"""Which failures are worth another try, and when. Decides; the calls act."""

import random
from collections.abc import Callable

import grpc

from weft.client.errors import WeftError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# CANCELLED reaches a caller who did not cancel when a server that shuts down ends what it still runs.
_RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class RetryState:
    """The tries of one call: at most `retries` failures in a row without progress, all of it before `deadline`."""

    def __init__(self, retries: int, deadline: float | None, draw: Callable[[], float] = random.random) -> None:
        self._retries = retries
        self._deadline = deadline
        self._draw = draw
        self._failures = 0

    def progress(self) -> None:
        """The try under way has brought something new: the count of failures starts again."""
        self._failures = 0

    def left(self, now: float) -> float | None:
        """Seconds until the deadline, None without one. Raises WeftError when it has passed."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise WeftError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed", reason="DEADLINE")
        return self._deadline - now

    def pause(self, error: WeftError, now: float) -> float:
        """Seconds to wait before the next try. Raises `error` if there shall be none.

        Exponential with jitter of one half, so that clients of a restarted server do not come back at one instant, and
        never sooner than the server asked for.
        """
        if error.code not in _RETRYABLE or self._failures >= self._retries:
            raise error
        pause: float = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        pause = max(pause * (0.5 + 0.5 * self._draw()), error.retry_after_s)
        if self._deadline is not None and now + pause >= self._deadline:
            raise error
        self._failures += 1
        return pause
