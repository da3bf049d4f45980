"""Reads contents of blocks for other workers, a few at a time, also of prompts that are still being computed.

Runs on the engine's thread. Knows keys and bytes, not who asks or how they are sent.
"""

import time
from collections import deque
from collections.abc import Callable

from services.worker.engine.base import BlockRead
from services.worker.kvcache.pool import KvPool
from services.worker.planner.block_pool import BlockPool

FOLLOW_S = 5.0
"""Seconds that a request waits for its next block to be computed."""
_READ_BYTES = 2 << 20  # in one step and for one request: copying them takes about a millisecond
_AHEAD_BYTES = 4 << 20  # read for a request and not sent yet


class BlockReads:
    """The requests of other workers. `add` may be called from any thread."""

    def __init__(
        self,
        pool: BlockPool,
        kv: KvPool | None,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """kv: None if blocks have no contents. wake() makes the engine call `serve`."""
        self._pool, self._kv, self._wake, self._clock = pool, kv, wake, clock
        self._new: deque[BlockRead] = deque()
        self._reads: dict[BlockRead, float] = {}
        """Each with the time until which it waits for its next block."""

    def add(self, read: BlockRead) -> None:
        """Answer this request."""
        self._new.append(read)
        self._wake()

    @property
    def pending(self) -> bool:
        """Whether there are requests that `serve` has not seen."""
        return bool(self._new)

    def serve(self) -> bool:
        """Read some blocks for each request. -> whether there is more to read at once."""
        if not self._new and not self._reads:
            return False
        now = self._clock()
        while self._new:
            self._reads[self._new.popleft()] = now + FOLLOW_S
        more = False
        for read, until in list(self._reads.items()):
            more |= self._serve(read, until, now)
        return more

    def _serve(self, read: BlockRead, until: float, now: float) -> bool:
        if self._kv is None or read.cancelled:
            self._end(read)
            return False
        size = self._kv.block_bytes
        room = min(_READ_BYTES, _AHEAD_BYTES - (read.read - read.sent) * size) // size
        if room <= 0 and read.read > read.sent:
            return False  # Its caller wakes the engine when some are sent.
        found = self._pool.match(read.keys[read.read : read.read + max(room, 1)])
        if found:
            self._pool.touch(found)
            self._reads[read] = now + FOLLOW_S
            read.read += len(found)
            read.answer(self._kv.read(found))
        if read.read == len(read.keys) or (not found and (not read.follow or now > until)):
            self._end(read)
            return False
        return bool(found)

    def _end(self, read: BlockRead) -> None:
        del self._reads[read]
        read.answer(None)
