"""Logs where every thread is when a process makes no progress. Knows no service; logs names of code alone, no values.

A thread runs its checks once a second, and logs a hang once until it has ended. A call of C code that holds the GIL
stops this thread, too: then `faulthandler` writes the stacks to stderr, once after GIL_S or a little later.
"""

import asyncio
import contextlib
import contextvars
import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeAlias

import structlog

log = structlog.get_logger("hang")

Check: TypeAlias = Callable[[float], str | None]
"""Called about once a second with `time.monotonic()`. -> why there seems to be a hang; None if there is none."""

LOOP_S = 2.0
"""Seconds without a callback after which an event loop is blocked."""
INTERVAL_S = 1.0
GIL_S = 10.0
_ARMED_S = 5.0
"""Seconds between two calls of `faulthandler`. Each call stops all threads until the timer thread of the call before it
has ended: for up to 10 ms on a busy machine."""
_OVERSLEPT_S = 0.5
"""Seconds by which this thread wakes too late if the process was suspended: no check runs then."""
_MOST_FRAMES = 40


class LoopCheck:
    """Whether an event loop still runs callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: float | None = None

    def __call__(self, now: float) -> str | None:
        """See `Check`."""
        if self._asked is None:
            self._asked = now
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._answer)
            return None
        silent_s = now - self._asked
        return f"the event loop has run nothing for {silent_s:.1f} s" if silent_s > LOOP_S else None

    def _answer(self) -> None:
        self._asked = None


class StepCheck:
    """Whether something that is busy makes steps."""

    def __init__(self, name: str, read: Callable[[], tuple[bool, int, float]]) -> None:
        """`read` returns whether it is busy, a counter that each step changes, and how long the current step may take
        in seconds."""
        self._name = name
        self._read = read
        self._steps = -1
        self._since = 0.0

    def __call__(self, now: float) -> str | None:
        """See `Check`."""
        busy, steps, most_s = self._read()
        if not busy or steps != self._steps:
            self._steps, self._since = steps, now
        silent_s = now - self._since
        return f"the {self._name} has made no step for {silent_s:.1f} s" if silent_s > most_s else None


@contextlib.contextmanager
def watching(*checks: Check, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """A block in which a thread runs these checks."""
    stop, context = threading.Event(), contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(_watch, checks, interval_s, stop), name="hang-watch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        faulthandler.cancel_dump_traceback_later()


def stacks() -> dict[str, list[str]]:
    """Where each thread of this process is: file, line and function, innermost last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    return {f"{names.get(ident, 'thread')} {ident}": _lines(frame) for ident, frame in frames.items()}


def _watch(checks: tuple[Check, ...], interval_s: float, stop: threading.Event) -> None:
    hanging = [False] * len(checks)
    at, armed_at = time.monotonic(), -math.inf
    while not stop.wait(interval_s):
        now = time.monotonic()
        if sys.__stderr__ is not None and now - armed_at > _ARMED_S:
            faulthandler.dump_traceback_later(GIL_S + _ARMED_S, file=sys.__stderr__)
            armed_at = now
        overslept, at = now - at - interval_s > _OVERSLEPT_S, now
        if overslept:
            continue
        for number, check in enumerate(checks):
            why = check(now)
            if why is not None and not hanging[number]:
                log.warning("hang", why=why, threads=stacks())
            hanging[number] = why is not None


def _lines(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        code = frame.f_code
        lines.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return lines[::-1]
