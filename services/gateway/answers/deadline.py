"""How long a call may take: ends its handler at the deadline or when the client reads no more. Knows no tokens."""

import asyncio
import time
from types import TracebackType

from grpc import StatusCode

from services.errors import WeftError
from services.gateway.answers.receipt import Phase, Timeline


class Deadline:
    """A `with` block around a handler. When patience ends the block is cancelled, and the verdict raised after it."""

    def __init__(self, timeline: Timeline, remaining_s: float | None, stall_s: float) -> None:
        self._timeline = timeline
        self._remaining_s = remaining_s
        self._stall_s = stall_s
        self._verdict: WeftError | None = None
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._verdict is not None and self._task is not None:
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._verdict

    def _watch(self) -> None:
        """Looks now and then whether one message has been on its way for too long; no timer for each message."""
        timeline = self._timeline
        if timeline.phase is Phase.DELIVER and time.monotonic() - timeline.since >= self._stall_s:
            stalled = WeftError(StatusCode.ABORTED, "SLOW_CONSUMER", "the client did not read what it asked for")
            self._end(stalled)
            return
        del self._timers[1 if self._remaining_s is not None else 0 :]
        self._timers.append(self._loop.call_later(self._stall_s / 8, self._watch))

    def _expire(self) -> None:
        self._end(deadline_exceeded())

    def _end(self, verdict: WeftError) -> None:
        if self._verdict is None and self._task is not None:
            self._verdict = verdict
            self._task.cancel()


def deadline_exceeded() -> WeftError:
    """The client's time is over."""
    return WeftError(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline has passed")
