"""Timers that end in time. Those of an event loop end up to 1 ms early or late: it waits for whole milliseconds.

On Linux one timer of the kernel (timerfd) wakes the loop at the time itself. Elsewhere the loop's own timers serve.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush

_libc = ctypes.CDLL(None, use_errno=True)
_ABSOLUTE = 1
"""TFD_TIMER_ABSTIME: the timer ends at a time of its clock."""


class Timer:
    """A callback at a time of the monotonic clock, in seconds."""

    __slots__ = ("_callback", "at")

    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self._callback: Callable[[], None] | None = callback

    def __lt__(self, other: "Timer") -> bool:
        return self.at < other.at

    def cancel(self) -> None:
        """The callback is not called any more."""
        self._callback = None

    def run(self) -> None:
        """Calls the callback, unless the timer was cancelled."""
        if self._callback is not None:
            self._callback()


class Timers:
    """The timers of the running event loop. To be closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Timer] = []
        """A heap."""
        self._wakes_at = math.inf
        """When the kernel's timer ends."""
        self._descriptor: int | None = None
        """The kernel's timer, once it is needed."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls the callback after this time, not before."""
        timer = Timer(time.monotonic() + seconds, callback)
        try:
            if timer.at < self._wakes_at:
                self._wake(timer.at)
        except OSError:  # There is no such timer, or the process may open no more files.
            self._loop.call_later(seconds, timer.run)
        else:
            heappush(self._waiting, timer)
        return timer

    def close(self) -> None:
        """Ends all timers; no callback is called any more."""
        self._waiting.clear()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor, self._wakes_at = None, math.inf

    def _wake(self, at: float) -> None:
        """Sets the kernel's timer. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = _open()
            self._loop.add_reader(self._descriptor, self._woken)
        interval_and_end = (ctypes.c_long * 4)(0, 0, *divmod(math.ceil(at * 1e9), 10**9))
        _libc.timerfd_settime(self._descriptor, _ABSOLUTE, interval_and_end, None)
        self._wakes_at = at

    def _woken(self) -> None:
        assert self._descriptor is not None
        with contextlib.suppress(BlockingIOError):  # It was set again meanwhile.
            os.read(self._descriptor, 8)
        now, self._wakes_at = time.monotonic(), math.inf
        while self._waiting and self._waiting[0].at <= now:
            self._loop.call_soon(heappop(self._waiting).run)
        if self._waiting:
            self._wake(self._waiting[0].at)


def _open() -> int:
    """A timer of the kernel -> its descriptor. Raises OSError."""
    if sys.platform != "linux":
        raise OSError("only Linux has timerfd")
    descriptor: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    return descriptor
