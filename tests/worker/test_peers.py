"""Blocks that travel from worker to worker, over a real socket: whole, checked, and only where that is faster."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from grpc import ChannelConnectivity, aio

from protos import cache_pb2 as cache
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.errors import WeftError
from services.hashing import digest
from services.worker.engine.base import BlockRead
from services.worker.engine.sharing.block_reads import BlockReads
from services.worker.kvcache import peer_tier
from services.worker.kvcache.peer_tier import PeerStore, PeerStores
from services.worker.kvcache.pool import LayersComputed
from services.worker.kvcache.tiers import BlockRequest, Contents
from services.worker.planner.block_pool import BlockPool
from services.worker.service.block_sender import BlockEngine, BlockSender

BLOCK_BYTES, LAYERS = 1_500_000, 8
"""More than one message."""
LAYER_BYTES = BLOCK_BYTES // LAYERS
KEYS = [digest(bytes([number])) for number in range(8)]
SECRET = b"s" * 32


def content(block: int) -> bytes:
    return b"".join(bytes([16 * layer + block]) * LAYER_BYTES for layer in range(LAYERS))


class FakePool:
    """A `LayeredPool` whose blocks hold their own number and that of each layer."""

    block_bytes = BLOCK_BYTES
    host_block_s = 0.0
    beside, settled = False, True
    broken = False
    """The step that computes the layers will fail."""

    def on_layers(self, call: LayersComputed) -> None:
        raise AssertionError

    def read_layers(self, blocks: list[int], begin: int, end: int) -> list[bytes]:
        size = LAYER_BYTES * (end - begin)
        return [bytes(size) if self.broken else content(block)[LAYER_BYTES * begin :][:size] for block in blocks]

    def scrub(self, blocks: list[int]) -> None:
        raise AssertionError

    def read(self, blocks: list[int]) -> list[bytes]:
        return [content(block) for block in blocks]

    def keep(self, blocks: list[int]) -> list[bytes]:
        raise AssertionError

    def write(self, blocks: list[int], payloads: Sequence[Contents]) -> None:
        raise AssertionError


class FakeEngine:
    """A thread that reads blocks for others, as an engine's does between its steps."""

    block_layout = "a layout"

    def __init__(self) -> None:
        self.pool, self.kv = BlockPool(len(KEYS)), FakePool()
        self._wake, self._stop = threading.Event(), False
        self.reads = BlockReads(self.pool, self.kv, self._wake.set, self._computing)
        self.step: dict[bytes, int] = {}
        """The blocks of the step."""
        self._due: list[Callable[[], object]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def compute(self, count: int) -> None:
        """Makes the next blocks findable."""

        def publish() -> None:
            self.step.clear()
            for block in self.pool.take(count):
                self.pool.publish(block, KEYS[block - 1])
                self.pool.release([block])

        self._do(publish)

    def begin(self, *blocks: int, broken: bool = False) -> None:
        """Begins a step for these blocks."""

        def begin() -> None:
            self.reads.void_parts()
            self.kv.broken, self.step = broken, {KEYS[block - 1]: block for block in blocks}

        self._do(begin)

    def layers(self, computed: int) -> None:
        """So many layers of the step are computed."""
        self._do(lambda: self.reads.layers_computed(computed, LAYERS))

    def _do(self, call: Callable[[], object]) -> None:
        done = threading.Event()
        self._due += [call, done.set]
        self._wake.set()
        assert done.wait(20)

    def _computing(self, keys: Sequence[bytes]) -> list[int]:
        return [self.step[key] for key in itertools.takewhile(self.step.__contains__, keys)]

    def read_blocks(self, read: BlockRead) -> None:
        self.reads.add(read)

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self._stop = True
        self._wake.set()
        self.thread.join()

    def _run(self) -> None:
        while not self._stop:
            while self._due:
                self._due.pop(0)()
            if not self.reads.serve():
                self._wake.wait(0.02)
                self._wake.clear()


class Service(mesh_grpc.WorkerServicer):
    """A worker that has blocks and nothing else. A test may damage what it sends."""

    def __init__(self, engine: BlockEngine) -> None:
        self.sender = BlockSender(engine, SECRET)
        self.damage: Callable[[mesh.ReadBlocksResponse], None] = lambda response: None
        self.times: Callable[[mesh.ReadBlocksResponse], int] = lambda response: 1
        """How often a message is sent."""
        self.asked = 0

    async def ReadBlocks(self, request: mesh.ReadBlocksRequest, context: Any) -> AsyncIterator[mesh.ReadBlocksResponse]:
        self.asked += not request.probe_bytes
        async for response in self.sender.send(request):
            self.damage(response)
            for _ in range(self.times(response)):
                yield response


@dataclass
class Scene:
    """A worker with blocks, and the tier that another one has of it."""

    engine: FakeEngine
    service: Service
    peers: PeerStores
    address: str
    came: list[Contents] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    """The place of each block of which a part was sent, and where in its contents the part began, in layers."""

    def __post_init__(self) -> None:
        self.service.damage = self._record

    def _record(self, response: mesh.ReadBlocksResponse) -> None:
        begun = response.offset // LAYER_BYTES
        self.parts += [(piece.index, begun) for piece in response.pieces if piece.last]

    async def sends(self, *parts: tuple[int, int]) -> None:
        """Waits until these parts alone were sent since the last call."""
        async with asyncio.timeout(20):
            while len(self.parts) < len(parts):  # noqa: ASYNC110 - each message changes it
                await asyncio.sleep(0.005)
        assert self.parts == list(parts)
        self.parts.clear()

    @property
    def store(self) -> PeerStore:
        return self.peers.at(self.address)

    def ask(self, budget_s: float = 20.0, follow: bool = False) -> "tuple[BlockRequest, asyncio.Event]":
        """Requests all blocks. -> the request, and an event for its end."""
        ended = asyncio.Event()

        def answer(request: BlockRequest, payloads: Sequence[Contents] | None) -> None:
            assert not ended.is_set()
            self.came += payloads or ()
            if payloads is None:
                ended.set()

        request = BlockRequest(KEYS, budget_s, answer, follow=follow)
        self.store.fetch(request)
        return request, ended

    async def fetch(self, budget_s: float = 20.0, follow: bool = False) -> int:
        """-> how many blocks came, all of them right."""
        async with asyncio.timeout(30):
            await self.ask(budget_s, follow)[1].wait()
        assert self.came == [content(block) for block in range(1, len(self.came) + 1)]
        return len(self.came)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = FakeEngine()
    service = Service(engine)  # type: ignore[abstract]
    entry = rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)
    server = await rpc.serve("127.0.0.1:0", [entry])
    peers = PeerStores("a layout", BLOCK_BYTES, _connect, SECRET)
    yield Scene(engine, service, peers, f"127.0.0.1:{server.port}")
    await peers.close()
    await server.stop(0)
    engine.stop()


def _connect(address: str) -> aio.Channel:
    return rpc.link_channel(address, "worker")


async def test_the_first_fetch_measures_the_link(scene: Scene) -> None:
    scene.engine.compute(8)
    assert scene.store.is_faster(8, 10.0)
    assert await scene.fetch() == 8
    assert scene.peers.fetches == {"fetched": 1}
    assert scene.store.link.known


async def test_blocks_follow_their_computation(scene: Scene) -> None:
    scene.engine.compute(2)
    _, ended = scene.ask(follow=True)
    for count in (2, 5, 8):
        async with asyncio.timeout(20):
            while len(scene.came) < count:
                assert not ended.is_set()
                await asyncio.sleep(0.005)
        scene.engine.compute(min(3, 8 - count))
    async with asyncio.timeout(20):
        await ended.wait()
    assert scene.came == [content(block) for block in range(1, 9)]


async def asked(scene: Scene) -> asyncio.Event:
    """Asks for all blocks; the engine has the request. -> an event for its end."""
    await scene.store._measure()
    scene.parts.clear()
    _, ended = scene.ask(follow=True)
    async with asyncio.timeout(20):
        while not scene.engine.reads._reads:  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.005)
    return ended


async def test_layers_come_while_the_others_are_computed(scene: Scene) -> None:
    ended = await asked(scene)
    scene.engine.begin(1, 2)
    scene.engine.layers(1)  # A part has at least a quarter of the layers.
    scene.engine.layers(2)
    await scene.sends((0, 0), (1, 0))
    scene.engine.layers(3)
    scene.engine.layers(6)
    await scene.sends((0, 2), (1, 2))
    assert not scene.came
    scene.engine.compute(2)
    await scene.sends((0, 6), (1, 6))
    scene.engine.begin(3)
    scene.engine.layers(4)
    await scene.sends((2, 0))
    scene.engine.compute(6)
    async with asyncio.timeout(20):
        await ended.wait()
    assert scene.parts == [(2, 4), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)]
    assert scene.came == [content(block) for block in range(1, 9)]
    assert scene.peers.received["grpc"] == scene.service.sender.sent == 8


@pytest.mark.parametrize("recomputed", [True, False])
async def test_parts_of_a_step_that_failed_are_void(scene: Scene, recomputed: bool) -> None:
    """The same blocks are computed again, by a step of which parts are read or of which none are."""
    ended = await asked(scene)
    scene.engine.begin(1, 2, broken=True)
    scene.engine.layers(4)
    await scene.sends((0, 0), (1, 0))
    scene.engine.begin(1, 2)
    if recomputed:
        scene.engine.layers(2)
        await scene.sends((0, 0), (1, 0))
    scene.engine.compute(8)
    async with asyncio.timeout(20):
        await ended.wait()
    assert scene.came == [content(block) for block in range(1, 9)]


async def test_no_more_is_read_ahead_than_is_sent_soon(scene: Scene) -> None:
    ended = await asked(scene)
    scene.engine.begin(*range(1, 9))
    scene.engine.layers(2)
    await scene.sends(*((place, 0) for place in range(5)))  # Two layers of 5 blocks are 2 MB.
    scene.engine.layers(6)
    await scene.sends((0, 2), (1, 2))
    scene.engine.compute(8)
    async with asyncio.timeout(20):
        await ended.wait()
    assert scene.parts == [(0, 6), (1, 6), (2, 2), (3, 2), (4, 2), (5, 0), (6, 0), (7, 0)]
    assert scene.came == [content(block) for block in range(1, 9)]


async def test_a_part_that_is_lost_is_not_replaced_by_another_one(scene: Scene) -> None:
    """By one of the same size, so that the contents have the right one."""
    ended = await asked(scene)
    scene.service.times = lambda response: {2: 0, 4: 2}.get(response.offset // LAYER_BYTES, 1)
    scene.engine.begin(1)
    for layers in (2, 4, 6):
        scene.engine.layers(layers)
        await scene.sends((0, layers - 2))
    scene.engine.compute(8)
    async with asyncio.timeout(20):
        await ended.wait()
    assert (scene.came, scene.peers.fetches) == ([], {"damaged": 1})


async def test_a_block_that_is_lost_ends_the_fetch(scene: Scene) -> None:
    scene.engine.compute(8)
    scene.service.times = lambda response: int(response.pieces[0].index != 2)
    assert await scene.fetch() == 2
    assert scene.peers.fetches == {"damaged": 1}


async def test_parts_that_are_not_sent_end_the_reading() -> None:
    """However many layers are computed: a slow link fills no memory."""
    pool, kv, read = BlockPool(len(KEYS)), FakePool(), BlockRead(KEYS, True, lambda parts: None, in_parts=True)
    reads = BlockReads(pool, kv, lambda: None, lambda keys: list(range(1, len(keys) + 1)))
    reads.add(read)
    for computed in (2, 4, 6, 6, 6):
        reads.layers_computed(computed, LAYERS)
    assert (4 << 20) - 4 * LAYER_BYTES < read.read_bytes <= 4 << 20
    read.sent_bytes = read.read_bytes
    before = read.read_bytes
    reads.layers_computed(6, LAYERS)
    assert read.read_bytes > before


async def test_a_worker_that_takes_no_parts_gets_whole_blocks(scene: Scene) -> None:
    blocks = cache.BlockList(keys=b"".join(KEYS), layout=b"a layout")
    sending = scene.service.sender.send(mesh.ReadBlocksRequest(blocks=blocks, follow=True))
    first = asyncio.ensure_future(anext(sending))
    async with asyncio.timeout(20):
        while not scene.engine.reads._reads:  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.005)
    scene.engine.begin(1, 2)
    scene.engine.layers(4)
    scene.engine.compute(8)
    responses = [await first] + [response async for response in sending]
    assert not any(response.offset for response in responses)
    assert sum(len(piece.data) for response in responses for piece in response.pieces) > 8 * BLOCK_BYTES


async def test_blocks_that_are_not_there_are_not_waited_for(scene: Scene) -> None:
    scene.engine.compute(3)
    assert await scene.fetch() == 3


def _flip(response: mesh.ReadBlocksResponse) -> None:
    for piece in response.pieces:
        if piece.index == 2 and piece.last:
            piece.data = bytes([piece.data[0] ^ 1]) + piece.data[1:]


def _skip(response: mesh.ReadBlocksResponse) -> None:
    for piece in response.pieces:
        piece.index += piece.index >= 2


def _move(response: mesh.ReadBlocksResponse) -> None:
    if response.pieces[0].index >= 2:
        response.offset += LAYER_BYTES


@pytest.mark.parametrize("damage", [_flip, _skip, _move])
async def test_a_wrong_block_ends_the_fetch(scene: Scene, damage: Callable[[mesh.ReadBlocksResponse], None]) -> None:
    scene.engine.compute(8)
    scene.service.damage = damage
    assert await scene.fetch() == 2
    assert scene.peers.fetches == {"damaged": 1}


async def test_blocks_of_a_worker_with_another_secret_are_wrong(scene: Scene) -> None:
    scene.engine.compute(8)
    scene.service.sender = BlockSender(scene.engine, b"another" * 5)
    assert await scene.fetch() == 0
    assert scene.peers.fetches == {"damaged": 1}


async def test_blocks_of_another_layout_are_refused(scene: Scene) -> None:
    scene.peers.layout = b"another layout"
    scene.engine.compute(8)
    assert await scene.fetch() == 0
    assert scene.peers.fetches == {"failed": 1}
    assert not scene.store.is_faster(8, 100.0), "it is not asked again at once"


async def test_a_fetch_that_would_take_too_long_is_not_started(scene: Scene) -> None:
    scene.engine.compute(8)
    scene.store.link.moved(1, 1e-3)
    assert not scene.store.is_faster(8, 10.0)
    assert await scene.fetch(budget_s=10.0) == 0
    assert scene.peers.fetches == {"too_slow": 1}
    assert scene.service.asked == 0


async def test_a_link_that_was_too_slow_is_measured_again(scene: Scene) -> None:
    scene.store.link.moved(1, 1e-3)
    async with asyncio.timeout(20):
        while not scene.store.is_faster(8, 10.0):
            scene.store._measured_at = 0.0
            await asyncio.sleep(0.01)


async def test_an_abandoned_fetch_ends(scene: Scene) -> None:
    scene.engine.compute(4)
    request, ended = scene.ask(follow=True)
    request.abandoned = True
    async with asyncio.timeout(20):
        await ended.wait()
    assert scene.peers.fetches == {"abandoned": 1}


async def test_a_worker_that_is_gone_is_a_miss_at_once(scene: Scene) -> None:
    ended = asyncio.Event()
    gone = scene.peers.at("127.0.0.1:1")
    gone.fetch(BlockRequest(KEYS, 60.0, lambda request, payloads: ended.set()))
    async with asyncio.timeout(20):
        await ended.wait()
    assert scene.peers.fetches == {"failed": 1}
    assert not gone.is_faster(8, 100.0), "it is not asked again at once"


async def test_of_many_workers_the_last_ones_stay_connected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "MOST_PEERS", 2)
    first, second, _ = [scene.peers.channel(f"127.0.0.1:{port}") for port in (1, 2, 3)]
    assert scene.peers.channel("127.0.0.1:2") is second
    stores = [scene.peers.at(f"127.0.0.1:{port}") for port in (1, 2, 1, 3, 1)]
    assert stores[0] is stores[2] is stores[4], "the least recently used one is forgotten"
    async with asyncio.timeout(20):
        while first.get_state() is not ChannelConnectivity.SHUTDOWN:  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(0.005)
    assert second.get_state() is not ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize(
    "request_",
    [
        mesh.ReadBlocksRequest(),
        mesh.ReadBlocksRequest(probe_bytes=(1 << 20) + 1),
        mesh.ReadBlocksRequest(blocks=cache.BlockList(keys=b"short", layout=b"a layout")),
    ],
)
async def test_malformed_requests_are_refused(scene: Scene, request_: mesh.ReadBlocksRequest) -> None:
    with pytest.raises(WeftError):
        await anext(scene.service.sender.send(request_))
