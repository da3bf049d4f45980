"""The block store in the cache service, over a real socket: each fetch ends within its budget."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc as cache_grpc
from services import rpc
from services.errors import unavailable
from services.hashing import digest, split_keys
from services.worker.kvcache.remote_tier import RemoteStore
from services.worker.kvcache.tiers import BlockRequest, Contents
from tests.timing import timely

BLOCK_BYTES = 40_000
KEYS = [digest(bytes([number])) for number in range(10)]


def content(key: bytes) -> bytes:
    return key * (BLOCK_BYTES // 32)


class FakeCache(cache_grpc.CacheServicer):
    """Stores blocks in a dict; a test may switch faults on."""

    def __init__(self) -> None:
        self.contents: dict[tuple[bytes, bytes], bytes] = {}
        self.hangs = False
        self.hangs_after = 1 << 30
        self.shuffled = False
        self.refuses = False
        self.asked = 0

    async def LookUpVectors(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        raise AssertionError("workers ask for no vectors")

    async def PutVectors(self, request: cache.PutVectorsRequest, context: Any) -> cache.PutVectorsResponse:
        raise AssertionError("workers store no vectors")

    async def GetResult(self, request: cache.GetResultRequest, context: Any) -> cache.GetResultResponse:
        raise AssertionError("workers ask for no results")

    async def PutResult(self, request: cache.PutResultRequest, context: Any) -> cache.PutResultResponse:
        raise AssertionError("workers store no results")

    async def HasBlocks(self, request: cache.HasBlocksRequest, context: Any) -> cache.HasBlocksResponse:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(60)
        there = [(key, request.blocks.layout) in self.contents for key in split_keys(request.blocks.keys)]
        return cache.HasBlocksResponse(stored=[*there, False].index(False))

    async def GetBlocks(self, request: cache.GetBlocksRequest, context: Any) -> AsyncIterator[cache.GetBlocksResponse]:
        for index, key in enumerate(split_keys(request.blocks.keys)):
            if index == self.hangs_after:
                await asyncio.sleep(60)
            if (key, request.blocks.layout) not in self.contents:
                return
            payload = self.contents[key, request.blocks.layout]
            half = len(payload) // 2
            first = cache.BlockPiece(index=index, data=payload[:half])
            last = cache.BlockPiece(index=index + self.shuffled * (index == 2), data=payload[half:], last=True)
            yield cache.GetBlocksResponse(pieces=[first])
            yield cache.GetBlocksResponse(pieces=[last])

    async def PutBlocks(
        self, requests: AsyncIterator[cache.PutBlocksRequest], context: Any
    ) -> AsyncIterator[cache.PutBlocksResponse]:
        blocks = (await anext(requests)).blocks
        names = [(key, blocks.layout) for key in split_keys(blocks.keys)]
        wanted = [index for index, name in enumerate(names) if name not in self.contents]
        yield cache.PutBlocksResponse(wanted=wanted)
        if self.refuses:
            await anext(requests)
            raise unavailable("GONE", "in the middle of an offer")
        async for request in requests:
            for piece in request.pieces:
                self.contents[names[piece.index]] = self.contents.get(names[piece.index], b"") + piece.data
        yield cache.PutBlocksResponse(stored=wanted)


@dataclass
class Scene:
    """A store that has measured its link, and its cache service."""

    store: RemoteStore
    service: FakeCache
    layout: bytes = b"a layout"
    came: list[Contents] = field(default_factory=list)

    async def keep(self, count: int) -> None:
        """Offers the first blocks and waits until they are stored."""
        for key in KEYS[:count]:
            assert self.store.offer(key, content(key))
        async with asyncio.timeout(10):
            while self.store.lacks(KEYS[:count], 100.0):  # noqa: ASYNC110 - no event is set
                await asyncio.sleep(0.005)

    async def fetch(self, keys: list[bytes], budget_s: float = 10.0) -> float:
        """Fetches blocks and returns the seconds until the request was answered."""
        ended = asyncio.Event()
        self.came.clear()

        def answer(request: BlockRequest, payloads: Sequence[Contents] | None) -> None:
            assert not ended.is_set()
            self.came += payloads or ()
            if payloads is None:
                ended.set()

        began = time.monotonic()
        self.store.fetch(BlockRequest(keys, budget_s, answer))
        async with asyncio.timeout(20):
            await ended.wait()
        return time.monotonic() - began


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    service = FakeCache()
    server = await rpc.serve(
        "127.0.0.1:0", [rpc.Service("weft.v1.Cache", cache_grpc.add_CacheServicer_to_server, service)]
    )
    async with rpc.link_channel(f"127.0.0.1:{server.port}") as channel:
        store = RemoteStore(cache_grpc.CacheStub(channel), "a layout", BLOCK_BYTES)
        running = asyncio.create_task(store.run())
        async with asyncio.timeout(10):
            while not store.link.known:  # noqa: ASYNC110 - no event is set
                await asyncio.sleep(0.005)
        yield Scene(store, service)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    await server.stop(0)


async def test_offered_blocks_are_fetched(scene: Scene) -> None:
    await scene.keep(10)
    await scene.fetch(KEYS)
    assert scene.came == [content(key) for key in KEYS]
    assert scene.store.fetches == {"fetched": 1}
    assert scene.store.offers["stored"] == 11, "including the block that measured the link"


async def test_stored_blocks_are_not_offered_again(scene: Scene) -> None:
    await scene.keep(6)
    assert scene.store.lacks(KEYS, 100.0) == KEYS[6:]
    scene.service.contents.clear()
    await scene.fetch(KEYS)
    assert scene.store.fetches == {"absent": 1}
    assert scene.store.lacks(KEYS, 100.0) == KEYS


async def test_a_stored_part_of_a_prefix_is_fetched(scene: Scene) -> None:
    await scene.keep(4)
    await scene.fetch(KEYS)
    assert scene.came == [content(key) for key in KEYS[:4]]


@timely
async def test_a_fetch_that_would_take_too_long_is_not_started(scene: Scene) -> None:
    await scene.keep(10)
    scene.store.link.byte_s = 1e-5
    assert not scene.store.is_faster(10, 0.4)
    assert await scene.fetch(KEYS, budget_s=0.4) < 0.3
    assert scene.came == []
    assert scene.store.fetches == {"too_slow": 1}
    assert scene.store.lacks(KEYS, 0.4) == [], "nor are such blocks offered"


@timely
async def test_a_service_that_hangs_costs_the_budget_and_is_avoided(scene: Scene) -> None:
    await scene.keep(10)
    scene.service.hangs = True
    for _ in range(4):
        if scene.store.is_faster(10, 0.2):
            assert 0.15 < await scene.fetch(KEYS, budget_s=0.2) < 1.0
    assert scene.came == []
    assert 1 <= scene.store.fetches["late"] <= 4
    assert not scene.store.is_faster(10, 0.2)


@timely
async def test_a_stream_that_stops_costs_the_budget(scene: Scene) -> None:
    await scene.keep(10)
    scene.service.hangs_after = 3
    assert 0.2 < await scene.fetch(KEYS, budget_s=0.3) < 1.0
    assert scene.came == [content(key) for key in KEYS[:3]]
    assert scene.store.fetches == {"late": 1}


async def test_pieces_out_of_order_are_not_taken(scene: Scene) -> None:
    await scene.keep(10)
    scene.service.shuffled = True
    await scene.fetch(KEYS)
    assert scene.came == [content(key) for key in KEYS[:2]]


async def test_a_service_lost_during_an_offer_receives_the_next_one(scene: Scene) -> None:
    scene.service.refuses = True
    for number, key in enumerate(KEYS, 1):
        assert scene.store.offer(key, content(key) * 100)
        async with asyncio.timeout(10):
            while scene.store.offers["lost"] < number:  # noqa: ASYNC110 - no event is set
                await asyncio.sleep(0.005)
    scene.service.refuses = False
    await scene.keep(5)
    assert scene.store.offers["stored"] >= 5


async def test_an_absent_service_is_a_miss_at_once() -> None:
    async with rpc.link_channel("127.0.0.1:1") as channel:
        store = RemoteStore(cache_grpc.CacheStub(channel), "a layout", BLOCK_BYTES)
        scene = Scene(store, FakeCache())
        assert await scene.fetch(KEYS, budget_s=5.0) < 2.0
        assert store.fetches == {"failed": 1}
        assert not store.is_faster(10, 100.0), "an unmeasured link is not used"


async def test_offers_are_bounded(scene: Scene) -> None:
    taken = 0
    while scene.store.offer(digest(b"bound", taken.to_bytes(4, "big")), bytes(BLOCK_BYTES)):
        taken += 1
        assert taken < 1000
    assert taken * BLOCK_BYTES <= (16 << 20) + BLOCK_BYTES


@pytest.mark.parametrize("known", [True, False])
async def test_a_known_block_is_not_sent(scene: Scene, known: bool) -> None:
    if known:
        scene.service.contents[KEYS[0], b"a layout"] = content(KEYS[0])
    await scene.keep(1)
    assert scene.store.offers["known"] == known
