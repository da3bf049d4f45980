"""Whether this process takes another call, by its own load: a bound on calls that run, and a share of calls while its
event loop has no time left. Knows no protocols, no tenants and no requests.

A call that is refused is cheap, but not free: gRPC hands it to Python like any other. So the share of calls to take is
found by feedback: it falls while many calls arrive, and either the event loop's thread computes nearly all of the time
or calls wait long before they are seen at all, and rises again when neither is so. A burst that is over soon lowers
nothing, and neither do streams that take all of the time: a message then carries more tokens. A loop that waits for a
processor, because other processes have all of them, matters only where calls wait for it.

Clients that each wait for their answer before they ask again may take all of the time, too. Then calls wait no longer
than one of each client takes, while in an overload they wait ever longer. So while no calls were refused for a while, a
busy loop lowers nothing, and calls may wait longer.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable

import structlog

from services.errors import WeftError, exhausted

log = structlog.get_logger("load")

REASON = "GATEWAY_OVERLOADED"
RETRY_S = 1.0
WINDOW_S = 0.05
BUSIEST = 0.93
"""Share of a window that the event loop computes at the most before calls are refused."""
_SATURATED = 0.98
FEW_PER_S = 100.0
"""Calls per second that take a few percent of the time: to refuse some of them would gain nothing."""
LONGEST_WAIT_S = 0.05
"""Time that calls may wait before they are seen. Beside busy processes some wait as long, whatever is refused."""
LONGEST_CALM_WAIT_S = 0.2
"""The same in calm: while no calls were refused for a while."""
_CALM_S = 10.0
"""Time without a refusal after which it is calm."""
_AVERAGED_S = 1.0
"""Time over which calls are counted: a wave of 64 clients, one call each, is no overload."""
PATIENCE, CALM_PATIENCE = 4, 2
"""Busy or late windows, one after the other, after which calls are refused; in calm, where calls wait longer, fewer."""
_FALL, _SLOW_FALL, _FASTEST_RISE, _RISE = 0.75, 0.95, 1.25, 0.01
_LEAST = 0.01
"""Share of calls that is taken at the least: without any, nothing would show that there is time again."""
_LEAST_LATE = 1 / 8
"""The same where calls only wait: if refusing so many does not shorten the wait, neither does refusing more."""
_LOG_S = 10.0


class AdmittedShare:
    """The share of calls to take, from 0.01 to 1, after each window of time. Pure."""

    def __init__(self) -> None:
        self.share = 1.0
        self._busy = 0
        """Windows with many calls that were busy or late since the last that was neither."""
        self._wait_s = 0.0

    def update(self, busy: float, calls_per_s: float, wait_s: float = 0.0, calm: bool = False) -> float:
        """Applies a window in which the event loop computed for the share `busy` of the time, and calls arrived at this
        rate and were seen after `wait_s` -> the new share."""
        many, shorter = calls_per_s > FEW_PER_S, wait_s < self._wait_s
        late = wait_s > LONGEST_CALM_WAIT_S if calm else wait_s > LONGEST_WAIT_S or busy > BUSIEST
        self._wait_s = wait_s
        self._busy = self._busy + 1 if many and late else 0
        if self.share == 1.0 and self._busy < (CALM_PATIENCE if calm else PATIENCE):
            return self.share
        if not self._busy:
            rise = BUSIEST / max(busy, 0.1) if many else _FASTEST_RISE
            self.share = self.share * min(_FASTEST_RISE, rise) + _RISE
        elif calm:  # Nothing shows yet how much too much arrives; a share that is too small soon rises.
            self.share = LONGEST_WAIT_S / wait_s
        elif busy > BUSIEST:
            self.share *= _FALL if busy > _SATURATED else _SLOW_FALL
        elif not shorter:  # Else the share is small enough: fewer calls wait than before.
            self.share = min(self.share, max(_LEAST_LATE, self.share * max(_FALL, LONGEST_WAIT_S / wait_s)))
        self.share = min(1.0, max(_LEAST, self.share))
        return self.share


class LoadGate:
    """Refuses calls that this process has no time for."""

    def __init__(
        self,
        most_calls: int,
        running: Callable[[], int],
        wait_s: Callable[[], float] | None = None,
        refused_later: Callable[[], int] = lambda: 0,
    ) -> None:
        """`most_calls` that may run at once; `running` returns those that run. `wait_s` returns how many seconds a call
        waits until it is seen; it is asked once in each window with many calls. Where that cannot be measured, it is
        never calm. `refused_later` returns how many calls were taken here and then refused because of the load of
        others."""
        self.refused = 0
        self._most_calls = most_calls
        self._running = running
        self._wait_s = wait_s
        self._refused_later = refused_later
        self._refused_until, self._refused_at = 0, -math.inf
        """Calls that were refused until the last window, and the time of the last one."""
        self._admitted = AdmittedShare()
        self._arrived = 0
        """Calls in this window of time."""
        self._call = asyncio.Event()
        """A call has arrived since the last window that was without any."""

    def share_now(self) -> float:
        """The share of calls that is taken now."""
        return self._admitted.share

    def refusal(self) -> WeftError | None:
        """Why a call that arrives now is refused; None if it is taken."""
        self._arrived += 1
        self._call.set()
        share = self._admitted.share
        if self._running() < self._most_calls and (share >= 1.0 or random.random() < share):
            return None
        self.refused += 1
        return overloaded()

    def check(self) -> None:
        """Raises WeftError if a call that arrives now is refused."""
        error = self.refusal()
        if error is not None:
            raise error

    async def watch(self) -> None:
        """Measures the load of the calling thread's event loop until cancelled. Sleeps while no calls arrive."""
        logged_at = -_LOG_S
        while True:
            await self._call.wait()
            logged_at = await self._watch_calls(logged_at)

    async def _watch_calls(self, logged_at: float) -> float:
        """Measures until all calls are taken and none has arrived for a while -> when the last line was logged."""
        at, used, calls_per_s = time.monotonic(), time.thread_time(), 0.0
        while True:
            await asyncio.sleep(WINDOW_S)
            now, now_used = time.monotonic(), time.thread_time()
            arrived, self._arrived = self._arrived, 0
            calls_per_s += (arrived / (now - at) - calls_per_s) * min(1.0, (now - at) / _AVERAGED_S)
            wait_s = self._wait_s() if self._wait_s and calls_per_s > FEW_PER_S else 0.0
            share = self._admitted.update((now_used - used) / (now - at), calls_per_s, wait_s, self._is_calm(now))
            if share < 0.5 and now - logged_at > _LOG_S:
                log.warning("the gateway is overloaded", admitted=round(share, 3), refused=self.refused)
                logged_at = now
            at, used = now, now_used
            if share == 1.0 and not arrived and calls_per_s < 1.0:
                self._call.clear()
                return logged_at

    def _is_calm(self, now: float) -> bool:
        """Whether no calls were refused for a while, and those that wait would be noticed."""
        refused = self.refused + self._refused_later()
        if refused != self._refused_until:
            self._refused_until, self._refused_at = refused, now
        return self._wait_s is not None and now - self._refused_at > _CALM_S


def overloaded() -> WeftError:
    """This process has no time for the call; another one may have."""
    return exhausted(REASON, "the gateway is overloaded", RETRY_S)
