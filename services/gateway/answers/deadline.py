"""The time limits of a call: ends it at its deadline, or when the client stops reading. Knows no tokens."""

import asyncio
import time
from types import TracebackType

from grpc import StatusCode

from services.errors import WeftError
from services.gateway.answers.receipt import Phase, Timeline


class Deadline:
    """A `with` block that is cancelled when a time limit is exceeded; the error is raised at its end."""

    def __init__(self, timeline: Timeline, remaining_s: float | None, stall_s: float) -> None:
        """`remaining_s` until the deadline, or None; `stall_s`: longest delivery of one message."""
        self._timeline = timeline
        self._remaining_s = remaining_s
        self._stall_s = stall_s
        self._error: WeftError | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> "Deadline":
        self._task = asyncio.current_task()
        if self._remaining_s is not None:
            self._timers.append(self._loop.call_later(max(0.0, self._remaining_s), self._expire))
        self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._error is not None and self._task is not None:
            self._task.uncancel()
            if isinstance(raised, asyncio.CancelledError):
                raise self._error

    def _watch(self) -> None:
        """Checks periodically how long the current delivery takes: a timer for each message would cost more."""
        timeline = self._timeline
        if timeline.phase is Phase.DELIVER and time.monotonic() - timeline.since >= self._stall_s:
            stalled = WeftError(StatusCode.ABORTED, "SLOW_CONSUMER", "the client does not read the answer")
            self._end(stalled)
            return
        del self._timers[1 if self._remaining_s is not None else 0 :]
        self._timers.append(self._loop.call_later(self._stall_s / 8, self._watch))

    def _expire(self) -> None:
        self._end(deadline_exceeded())

    def _end(self, error: WeftError) -> None:
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()


def deadline_exceeded() -> WeftError:
    """The client's deadline has passed."""
    return WeftError(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline has passed")
