"""Timers of the gateway: in order, never early, cancelled where that is asked, and without the kernel's timer, too."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import uvloop

from services.gateway.links import timers as module
from services.gateway.links.timers import Timers
from tests.gateway.fakes import until

WAITS_S = (0.0124, 0.0, 0.0034, 0.0006, 0.0046, 0.0014, 0.0034, 0.0024)


def test_timers_end_in_order_and_never_early() -> None:
    """The event loop of the gateway would end those of 1.4 ms after 1 ms."""
    ended: list[tuple[float, float]] = []

    def end(due: float) -> None:
        ended.append((due, time.monotonic()))

    async def work() -> None:
        timers = Timers()
        for _ in range(20):
            for wait_s in WAITS_S:
                timers.call_later(wait_s, partial(end, time.monotonic() + wait_s))
            await until(lambda: len(ended) == len(WAITS_S))
            assert ended == sorted(ended)
            assert all(at >= due for due, at in ended)
            ended.clear()
        timers.close()

    uvloop.run(work())


def test_timers_end_within_parts_of_a_millisecond() -> None:
    """At least those that found the machine idle. Each is due 0.1 ms after a whole millisecond of the clock."""
    late: list[float] = []

    async def work() -> None:
        timers = Timers()
        for _ in range(40):
            due, ended = math.ceil(time.monotonic() * 1e3) / 1e3 + 0.0021, asyncio.Event()
            timers.call_later(due - time.monotonic(), ended.set)
            await ended.wait()
            late.append(time.monotonic() - due)
        timers.close()

    uvloop.run(work())
    assert min(late) < 0.0005


async def test_a_timer_that_was_cancelled_does_nothing() -> None:
    called: list[str] = []
    timers = Timers()
    first = timers.call_later(0.001, lambda: called.append("first"))
    second = timers.call_later(0.001, lambda: called.append("second"))

    def cancel_next() -> None:
        third.cancel()

    timers.call_later(0.0005, cancel_next)
    third = timers.call_later(0.001, lambda: called.append("third"))
    timers.call_later(0.002, lambda: called.append("last"))
    first.cancel()
    await until(lambda: "last" in called)
    second.cancel()
    assert called == ["second", "last"]
    timers.close()


async def test_a_callback_that_fails_stops_no_other_timer() -> None:
    loop, failures, called = asyncio.get_running_loop(), list[object](), list[str]()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    timers = Timers()
    timers.call_later(0.001, lambda: called.remove("nothing"))
    timers.call_later(0.001, lambda: called.append("second"))
    timers.call_later(0.003, lambda: called.append("third"))
    await until(lambda: called == ["second", "third"])
    assert [type(each) for each in failures] == [ValueError]
    timers.close()


async def test_a_callback_may_set_timers() -> None:
    called: list[int] = []
    timers = Timers()

    def again() -> None:
        called.append(len(called))
        if len(called) < 5:
            timers.call_later(0.0002, again)

    timers.call_later(0.0002, again)
    timers.call_later(0.05, lambda: called.append(-1))
    await until(lambda: -1 in called)
    assert called == [0, 1, 2, 3, 4, -1]
    timers.close()


def kernel_timers() -> int:
    """How many timers of the kernel this process has open."""
    opened = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The listing itself.
            opened += "timerfd" in os.readlink(f"/proc/self/fd/{name}")
    return opened


async def test_closed_timers_leave_nothing_open() -> None:
    before = kernel_timers()
    called: list[str] = []
    timers = Timers()
    timers.close()  # None was set.
    timers.call_later(0.001, lambda: called.append("late"))
    assert kernel_timers() == before + 1
    timers.close()
    assert kernel_timers() == before
    timers.call_later(0.002, lambda: called.append("new"))
    await until(lambda: bool(called))
    assert called == ["new"]
    timers.close()


def _none() -> int:
    raise OSError("too many open files")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_without_a_timer_of_the_kernel_the_event_loop_serves(
    run: Callable[[Awaitable[None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    async def work() -> None:
        monkeypatch.setattr(module, "_open", _none)
        timers = Timers()
        cancelled = timers.call_later(0.001, lambda: called.append("cancelled"))
        timers.call_later(0.004, lambda: called.append("second"))
        timers.call_later(0.001, lambda: called.append("first"))
        cancelled.cancel()
        await until(lambda: len(called) == 2)
        timers.close()

    run(work())
    assert called == ["first", "second"]
