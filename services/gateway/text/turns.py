"""Work of many tenants in threads, one piece of each tenant in turn, with bounds on what waits. Knows no texts."""

import asyncio
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.errors import WeftError, exhausted, unavailable

Result = TypeVar("Result")
_NICE = 10


class Turns:
    """Runs work in `threads` threads. Work that waits belongs to tenants, which take turns."""

    def __init__(self, threads: int, most_bytes: int, name: str, *, nice: bool = False) -> None:
        """`most_bytes` of each tenant may wait or run. `nice`: the threads give way to others of this machine."""
        self._threads = ThreadPoolExecutor(threads, name, initializer=_be_nice if nice else None)
        self._free = threads
        self._most_bytes = most_bytes
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._bytes: Counter[str] = Counter()

    async def run(self, tenant: str, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on `size` bytes, when it is the tenant's turn. Cancelled work that waits is dropped.

        Raises WeftError if too much of the tenant waits, and what `work` raises.
        """
        if self._bytes[tenant] and self._bytes[tenant] + size > self._most_bytes:
            raise exhausted("TEXT_BACKLOG", "too many bytes of this tenant's prompts wait to be tokenized", 1.0)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._bytes[tenant] += size
        self._waiting.setdefault(tenant, deque()).append((future, work))
        self._start()
        try:
            return await future
        finally:
            self._bytes[tenant] -= size
            if not self._bytes[tenant]:
                del self._bytes[tenant]

    @property
    def idle(self) -> bool:
        """No work waits, and there is a free thread."""
        return self._free > 0 and not self._waiting

    def close(self) -> None:
        """Fails what waits; what runs ends by itself."""
        waiting = [future for own in self._waiting.values() for future, _ in own if not future.done()]
        self._waiting.clear()
        for future in waiting:
            future.set_exception(no_tokenizer())
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Starts as much work as there are free threads, of the tenant that has waited longest for its turn."""
        while self._free and self._waiting:
            tenant, own = self._waiting.popitem(last=False)
            future, work = own.popleft()
            if own:
                self._waiting[tenant] = own
            if future.done():  # Cancelled.
                continue
            self._free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            running.add_done_callback(lambda done, future=future: self._done(done, future))  # type: ignore[misc]

    def _done(self, done: "asyncio.Future[Any]", future: "asyncio.Future[Any]") -> None:
        self._free += 1
        error = None if done.cancelled() else done.exception()
        if not future.done():
            if done.cancelled():
                future.cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())
        self._start()


def no_tokenizer() -> WeftError:
    """The tokenizer and template of the request's model are not in memory: another request may load them."""
    return unavailable("NO_TOKENIZER", "the model's tokenizer is not available")


def _be_nice() -> None:
    """Lowers the priority of this thread alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
