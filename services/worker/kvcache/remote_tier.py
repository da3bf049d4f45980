"""The tier in the cache service: fetches and offers contents of blocks over gRPC, and measures how fast that is.

Lives on the event loop; the engine's thread calls the methods of `BlockStore`. Knows the cache's messages, not Redis.
Whatever goes wrong, less is fetched or stored, and it is counted.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence

import structlog
from grpc import aio

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc as cache_grpc
from services import hashing, telemetry
from services.worker.kvcache.tiers import BlockRequest
from services.worker.kvcache.transfer_cost import TransferCost

log = structlog.get_logger("worker.remote")

MESSAGE_BYTES = 1 << 20
MEASURE_BYTES = 256 << 10
MEASURE_S = 5.0
"""Seconds between measurements for their own sake: while no job dares to fetch, nothing else tells of a faster link."""
_MEASURE_TIMES = 3
_MEASURE_LIMIT_S = 3.0
# A block is not worth keeping if fetching is predicted to take so many times longer than computing. Not just longer:
# others may have a better link, and this one may be busy for a moment.
_HOPELESS = 4.0
_OFFER_LIMIT_S = 30.0
_OFFERED_BYTES = 16 << 20
_BATCH_BLOCKS = 128
_MOST_KNOWN = 1 << 16
# A call that breaks says so when it is read, and by the second of these when it is written to after its end.
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
        """The measured way from the cache service to here."""
        self.fetches: Counter[str] = Counter()
        """What became of wishes: fetched, absent, dear, late, abandoned, failed."""
        self.offers: Counter[str] = Counter()
        """What became of offered blocks: stored, known, lost."""
        self._stub = stub
        self._metadata = metadata
        self._layout = layout.encode()
        self._block_bytes = block_bytes
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._offers: deque[tuple[bytes, bytes]] = deque()
        self._offered = asyncio.Event()
        self._curious = True
        self._fetching: set[asyncio.Task[None]] = set()

    # ---- the engine's thread ----

    def pays(self, blocks: int, recompute_s: float) -> bool:
        """By the link as it was measured. Where it does not, it is measured again before long."""
        pays = self.link.pays(blocks * self._block_bytes, recompute_s)
        self._curious |= not pays
        return pays

    def fetch(self, wish: BlockRequest) -> None:
        """Asks the cache service."""
        self._loop.call_soon_threadsafe(self._start, wish)

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """Those not known to be stored."""
        if self.link.known and not self.pays(len(keys), _HOPELESS * recompute_s):
            return []
        return [key for key in keys if key not in self._known]

    def offer(self, key: bytes, payload: bytes) -> bool:
        """Queues it."""
        if len(self._offers) * self._block_bytes > _OFFERED_BYTES:
            return False
        self._offers.append((key, payload))
        self._loop.call_soon_threadsafe(self._offered.set)
        return True

    # ---- the event loop ----

    async def run(self) -> None:
        """Stores what is offered and measures the link, until it is cancelled."""
        tasks = [asyncio.create_task(self._store_offers()), asyncio.create_task(self._measure_often())]
        try:
            await asyncio.gather(*tasks)
        except Exception as error:
            telemetry.log_exception("sharing prefixes failed", error)
        finally:
            for task in (*tasks, *self._fetching):
                task.cancel()
            await asyncio.gather(*tasks, *self._fetching, return_exceptions=True)

    def _start(self, wish: BlockRequest) -> None:
        task = asyncio.create_task(self._fetch(wish))
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    async def _fetch(self, wish: BlockRequest) -> None:
        began = time.monotonic()
        outcome = "failed"
        try:
            async with asyncio.timeout(wish.budget_s) as limit:
                stored = await self._count(wish.keys)
                budget_s = wish.budget_s * stored / len(wish.keys)
                limit.reschedule(self._loop.time() + budget_s - (time.monotonic() - began))
                if stored == 0:
                    outcome = "absent"
                elif not self.link.pays(stored * self._block_bytes, budget_s):
                    outcome = "dear"
                else:
                    outcome = await self._receive(wish, stored)
        except TimeoutError:
            outcome = "late"
        except aio.AioRpcError as error:
            log.debug("fetch failed", code=error.code().name)
        finally:
            self.fetches[outcome] += 1
            wish.answer(wish, None)

    async def _count(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a prefix are stored."""
        began = time.monotonic()
        try:
            reply = await self._stub.HasBlocks(cache.HasBlocksRequest(blocks=self._list(keys)), metadata=self._metadata)
        finally:  # An answer that came too late tells as much: a few of them, and nobody asks for a while.
            self.link.answered(time.monotonic() - began)
        stored = min(reply.stored, len(keys))
        self._know(keys[:stored])
        for key in keys[stored:]:
            self._known.pop(key, None)
        return stored

    async def _receive(self, wish: BlockRequest, stored: int) -> str:
        """Hands on what comes; says what became of it."""
        began, received = time.monotonic(), 0
        blocks = _Assembly(stored)
        request = cache.GetBlocksRequest(blocks=self._list(wish.keys[:stored]))
        call = self._stub.GetBlocks(request, metadata=self._metadata)
        try:
            async for response in call:
                received += sum(len(piece.data) for piece in response.pieces)
                wish.answer(wish, blocks.add(response.pieces))
                if wish.abandoned:
                    return "abandoned"
        finally:
            call.cancel()
            self.link.moved(max(received, self._block_bytes), time.monotonic() - began)
        if blocks.whole < stored:  # Removed meanwhile, or damaged.
            for key in wish.keys[blocks.whole : stored]:
                self._known.pop(key, None)
        return "fetched" if blocks.whole else "absent"

    async def _store_offers(self) -> None:
        while True:
            await self._offered.wait()
            self._offered.clear()
            while self._offers:
                count = min(len(self._offers), _BATCH_BLOCKS)
                batch = [self._offers[place] for place in range(count)]
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
            for piece in _pieces(index, batch[index][1]):
                await call.write(cache.PutBlocksRequest(pieces=[piece]))
        await call.done_writing()
        last = await call.read()
        stored = set(last.stored) if isinstance(last, cache.PutBlocksResponse) else set()
        self._know([key for place, key in enumerate(keys) if place in stored or place not in first.wanted])
        self.offers["stored"] += len(stored)
        self.offers["lost"] += len(first.wanted) - len(stored)
        self.offers["known"] += len(keys) - len(first.wanted)

    async def _measure_often(self) -> None:
        while True:
            if self._curious:
                self._curious = False
                with contextlib.suppress(*_BROKEN):
                    async with asyncio.timeout(_MEASURE_LIMIT_S):
                        await self._measure()
            await asyncio.sleep(MEASURE_S if self.link.known else MEASURE_S / 5)

    async def _measure(self) -> None:
        """Store random bytes, unless they are there, and fetch them a few times: the quickest was least disturbed."""
        self._curious = True
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
        self._curious = False
        log.debug("link measured", latency_s=self.link.latency_s, byte_s=self.link.byte_s)

    def _list(self, keys: Sequence[bytes]) -> cache.BlockList:
        return cache.BlockList(keys=b"".join(keys), layout=self._layout)

    def _know(self, keys: Sequence[bytes]) -> None:
        """These are stored."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


class _Assembly:
    """Puts pieces together to whole blocks, as they come in order."""

    def __init__(self, most: int) -> None:
        self.whole = 0
        self._most = most
        self._parts: list[bytes] = []

    def add(self, pieces: Sequence[cache.BlockPiece]) -> list[bytes]:
        """The blocks that are whole now. Nothing is taken that is out of order: what is missing will be computed."""
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


def _pieces(index: int, payload: bytes) -> Iterator[cache.BlockPiece]:
    for start in range(0, len(payload), MESSAGE_BYTES):
        end = start + MESSAGE_BYTES
        yield cache.BlockPiece(index=index, data=payload[start:end], last=end >= len(payload))
