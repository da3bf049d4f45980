"""The tier in the cache service: fetches and offers contents of blocks over gRPC, and measures how fast that is.

Runs on the event loop; the engine's thread calls the methods of `BlockStore`. Knows the cache's messages, not Redis.
After an error fewer blocks are fetched or stored, and the error is counted.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import structlog
from grpc import aio

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc as cache_grpc
from services import hashing, telemetry
from services.block_messages import pieces_of
from services.worker.kvcache.tiers import BlockRequest
from services.worker.kvcache.transfer_cost import TransferCost

log = structlog.get_logger("worker.remote")

MEASURE_BYTES = 256 << 10
MEASURE_S = 5.0
"""Seconds between measurements: while fetching is too slow for any job, nothing else shows that it became faster."""
_MEASURE_TIMES = 3
_MEASURE_LIMIT_S = 3.0
# A block is not stored if fetching it is predicted to take this multiple of the time of computing it. Not merely
# longer: other workers may have a faster link, and this one may be busy for a moment.
_HOPELESS = 4.0
_OFFER_LIMIT_S = 30.0
_OFFERED_BYTES = 16 << 20
_BATCH_BLOCKS = 128
_MOST_KNOWN = 1 << 16
# A broken call raises the first of these when it is read, the second when it is written to after its end.
_BROKEN = (aio.AioRpcError, asyncio.InvalidStateError, TimeoutError)


class RemoteStore:
    """A `BlockStore` behind weft.v1.Cache. `run` must run for it to do anything."""

    def __init__(
        self,
        stub: "cache_grpc.CacheAsyncStub",
        layout: str,
        block_bytes: int,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.link = TransferCost()
        """The measured speed from the cache service to this worker."""
        self.fetches: Counter[str] = Counter()
        """Requests by outcome: fetched, absent, too_slow, late, abandoned, failed."""
        self.offers: Counter[str] = Counter()
        """Offered blocks by outcome: stored, known, lost."""
        self._stub = stub
        self._metadata = metadata
        self._layout = layout.encode()
        self._block_bytes = block_bytes
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._offers: deque[tuple[bytes, bytes]] = deque()
        self._offered = asyncio.Event()
        self._measure_soon = True
        self._fetching: set[asyncio.Task[None]] = set()

    # ---- the engine's thread ----

    def is_faster(self, blocks: int, recompute_s: float) -> bool:
        """Predicted from the measured link. If fetching is slower, the link is measured again soon."""
        faster = self.link.is_faster(blocks * self._block_bytes, recompute_s)
        self._measure_soon |= not faster
        return faster

    def fetch(self, request: BlockRequest) -> None:
        """Ask the cache service."""
        self._loop.call_soon_threadsafe(self._start, request)

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """The blocks that are not known to be stored."""
        if self.link.known and not self.is_faster(len(keys), _HOPELESS * recompute_s):
            return []
        return [key for key in keys if key not in self._known]

    def offer(self, key: bytes, payload: bytes) -> bool:
        """Queue the contents."""
        if len(self._offers) * self._block_bytes > _OFFERED_BYTES:
            return False
        self._offers.append((key, payload))
        self._loop.call_soon_threadsafe(self._offered.set)
        return True

    # ---- the event loop ----

    async def run(self) -> None:
        """Store offered blocks and measure the link, until cancelled."""
        tasks = [asyncio.create_task(self._store_offers()), asyncio.create_task(self._measure_often())]
        try:
            await asyncio.gather(*tasks)
        except Exception as error:
            telemetry.log_exception("sharing prefixes failed", error)
        finally:
            for task in (*tasks, *self._fetching):
                task.cancel()
            await asyncio.gather(*tasks, *self._fetching, return_exceptions=True)

    def _start(self, request: BlockRequest) -> None:
        task = asyncio.create_task(self._fetch(request))
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    async def _fetch(self, request: BlockRequest) -> None:
        began = time.monotonic()
        outcome = "failed"
        try:
            async with asyncio.timeout(request.budget_s) as limit:
                stored = await self._count(request.keys)
                budget_s = request.budget_s * stored / len(request.keys)
                limit.reschedule(self._loop.time() + budget_s - (time.monotonic() - began))
                if stored == 0:
                    outcome = "absent"
                elif not self.link.is_faster(stored * self._block_bytes, budget_s):
                    outcome = "too_slow"
                else:
                    outcome = await self._receive(request, stored)
        except TimeoutError:
            outcome = "late"
        except aio.AioRpcError as error:
            log.debug("fetch failed", code=error.code().name)
        finally:
            self.fetches[outcome] += 1
            request.answer(request, None)

    async def _count(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a prefix are stored."""
        began = time.monotonic()
        try:
            reply = await self._stub.HasBlocks(cache.HasBlocksRequest(blocks=self._list(keys)), metadata=self._metadata)
        finally:  # A late answer counts, too: after a few of them nothing is requested for a while.
            self.link.answered(time.monotonic() - began)
        stored = min(reply.stored, len(keys))
        self._know(keys[:stored])
        for key in keys[stored:]:
            self._known.pop(key, None)
        return stored

    async def _receive(self, request: BlockRequest, stored: int) -> str:
        """Pass on the contents as they arrive. -> the outcome."""
        began, received = time.monotonic(), 0
        blocks = _Assembly(stored)
        wanted = cache.GetBlocksRequest(blocks=self._list(request.keys[:stored]))
        call = self._stub.GetBlocks(wanted, metadata=self._metadata)
        try:
            async for response in call:
                received += sum(len(piece.data) for piece in response.pieces)
                request.answer(request, blocks.add(response.pieces))
                if request.abandoned:
                    return "abandoned"
        finally:
            call.cancel()
            self.link.moved(max(received, self._block_bytes), time.monotonic() - began)
        if blocks.whole < stored:  # Removed meanwhile, or damaged.
            for key in request.keys[blocks.whole : stored]:
                self._known.pop(key, None)
        return "fetched" if blocks.whole else "absent"

    async def _store_offers(self) -> None:
        while True:
            await self._offered.wait()
            self._offered.clear()
            while self._offers:
                count = min(len(self._offers), _BATCH_BLOCKS)
                batch = [self._offers[index] for index in range(count)]
                try:
                    async with asyncio.timeout(_OFFER_LIMIT_S):
                        await self._put(batch)
                except _BROKEN:
                    self.offers["lost"] += count
                for _ in range(count):
                    self._offers.popleft()

    async def _put(self, batch: Sequence[tuple[bytes, bytes]]) -> None:
        keys = [key for key, _ in batch]
        call = self._stub.PutBlocks(metadata=self._metadata)
        await call.write(cache.PutBlocksRequest(blocks=self._list(keys)))
        first = await call.read()
        if not isinstance(first, cache.PutBlocksResponse):
            return
        for index in first.wanted:
            for piece in pieces_of(index, batch[index][1]):
                await call.write(cache.PutBlocksRequest(pieces=[piece]))
        await call.done_writing()
        last = await call.read()
        stored = set(last.stored) if isinstance(last, cache.PutBlocksResponse) else set()
        self._know([key for index, key in enumerate(keys) if index in stored or index not in first.wanted])
        self.offers["stored"] += len(stored)
        self.offers["lost"] += len(first.wanted) - len(stored)
        self.offers["known"] += len(keys) - len(first.wanted)

    async def _measure_often(self) -> None:
        while True:
            if self._measure_soon:
                self._measure_soon = False
                with contextlib.suppress(*_BROKEN):
                    async with asyncio.timeout(_MEASURE_LIMIT_S):
                        await self._measure()
            await asyncio.sleep(MEASURE_S if self.link.known else MEASURE_S / 5)

    async def _measure(self) -> None:
        """Store random bytes, unless they are stored, and fetch them a few times: the quickest fetch counts."""
        self._measure_soon = True
        key = hashing.digest(b"weft/measure/1", self._layout)
        await self._put([(key, os.urandom(MEASURE_BYTES))])
        await self._count([key])
        elapsed_s = []
        for _ in range(_MEASURE_TIMES):
            began = time.monotonic()
            request = cache.GetBlocksRequest(blocks=self._list([key]))
            call = self._stub.GetBlocks(request, metadata=self._metadata)
            if sum([len(piece.data) async for response in call for piece in response.pieces]) < MEASURE_BYTES:
                return
            elapsed_s.append(time.monotonic() - began)
        self.link.moved(MEASURE_BYTES, min(elapsed_s))
        self._measure_soon = False
        log.debug("link measured", latency_s=self.link.latency_s, byte_s=self.link.byte_s)

    def _list(self, keys: Sequence[bytes]) -> cache.BlockList:
        return cache.BlockList(keys=b"".join(keys), layout=self._layout)

    def _know(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are stored."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


class _Assembly:
    """Joins pieces to whole blocks, as they arrive in order."""

    def __init__(self, most: int) -> None:
        self.whole = 0
        self._most = most
        self._parts: list[bytes] = []

    def add(self, pieces: Sequence[cache.BlockPiece]) -> list[bytes]:
        """-> the blocks that are whole now. Pieces out of order are dropped: missing blocks will be computed."""
        payloads = []
        for piece in pieces:
            if piece.index != self.whole or self.whole == self._most:
                break
            self._parts.append(piece.data)
            if piece.last:
                payloads.append(b"".join(self._parts))
                self._parts = []
                self.whole += 1
        return payloads
