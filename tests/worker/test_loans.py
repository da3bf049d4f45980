"""Blocks that another worker copies itself: lent, unchanged until they are returned, and never taken for others."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from grpc import aio

from protos import cache_pb2 as cache
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import host, rpc
from services.errors import WeftError
from services.hashing import adapted, block_keys, chain_root, digest
from services.worker.engine.base import BlockLoan, LentBlocks
from services.worker.engine.sharing import block_loans
from services.worker.engine.sharing.block_loans import LOAN_S, BlockLoans
from services.worker.engine.sharing.block_reads import FOLLOW_S
from services.worker.kvcache import mapped_peer, peer_tier
from services.worker.kvcache.mapped_peer import Borrower
from services.worker.kvcache.peer_tier import PeerStore, PeerStores
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.kvcache.tiers import BlockRequest, Contents
from services.worker.planner.block_pool import BlockPool
from services.worker.service.block_lender import BlockLender
from services.worker.service.block_sender import BlockSender
from tests.checkpoints import SMALL_DEMO
from tests.worker.drive import job, open_engine, prompt_of, solo
from tests.worker.test_slow_links import FINGERPRINT, Running

BLOCKS = 40
KEYS = [digest(bytes([number])) for number in range(10)]
LAYOUT = "a layout"
LAYERS, LAYER_BYTES = 8, 32
BLOCK_BYTES = LAYERS * LAYER_BYTES
HOST = "this host"


# ---- the engine's side ----


def computing(step: dict[bytes, int], keys: Sequence[bytes]) -> list[int]:
    """The blocks that a step computes for the first of these keys."""
    return [step[key] for key in takewhile(step.__contains__, keys)]


class Book:
    """Loans of a pool, under a clock that a test moves."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS)
        self.now = 0.0
        self.step: dict[bytes, int] = {}
        """The blocks that the running step computes."""
        self.settled = True
        """Whether all that was written to the pool is in place."""
        self.loans = BlockLoans(
            self.pool, lambda: None, partial(computing, self.step), lambda: self.settled, lambda: self.now
        )
        self.parts: list[LentBlocks | None] = []

    @property
    def answers(self) -> list[list[int] | None]:
        """The blocks of each answer."""
        return [None if part is None else list(part.blocks) for part in self.parts]

    def lend(self, follow: bool = False, in_parts: bool = False) -> BlockLoan:
        """Asks for all keys."""
        loan = BlockLoan(KEYS, follow, self.parts.append, in_parts)
        self.loans.add(loan)
        self.loans.serve()
        return loan

    def compute(self, first: int, count: int) -> list[int]:
        """Makes blocks with these keys findable. -> their numbers."""
        taken = self.pool.take(count)
        for key, block in zip(KEYS[first : first + count], taken, strict=True):
            self.pool.publish(block, key)
        self.pool.release(taken)
        return taken

    def crowd(self) -> list[int]:
        """Takes all blocks that can be had, as jobs do, and gives them back."""
        taken = self.pool.take(self.pool.available)
        self.pool.release(taken)
        return taken


def test_lent_blocks_are_kept_until_they_are_returned() -> None:
    book = Book()
    blocks = book.compute(0, 10)
    loan = book.lend()
    assert book.answers == [blocks]
    assert not set(book.crowd()) & set(blocks)
    loan.returned = 4
    assert book.loans.pending
    book.loans.serve()
    assert set(book.crowd()) & set(blocks) == set(blocks[:4])
    loan.returned = 10
    book.loans.serve()
    assert book.answers[1:] == [None]
    assert len(book.crowd()) == BLOCKS
    book.pool.check()


def test_blocks_are_not_lent_before_what_was_fetched_is_in_place() -> None:
    book = Book()
    first, book.settled = book.compute(0, 2), False
    loan = book.lend()
    assert book.answers == []
    assert book.loans.serve(), "called again at once"
    book.settled = True
    assert not book.loans.serve()
    assert book.answers == [first]
    assert loan.lent == 2
    book.settled, loan.returned = False, 1
    book.loans.serve()
    assert set(book.crowd()) & set(first) == {first[0]}, "blocks are given back all the same"
    loan.cancelled = True
    book.loans.serve()
    assert len(book.crowd()) == BLOCKS
    book.pool.check()


def test_blocks_are_lent_as_they_are_computed() -> None:
    book = Book()
    first = book.compute(0, 3)
    loan = book.lend(follow=True)
    book.now += FOLLOW_S / 2
    loan.returned = 3
    book.loans.serve()
    second = book.compute(3, 7)
    book.now += FOLLOW_S - 0.1
    book.loans.serve()
    assert book.answers == [first, second]


def test_blocks_that_are_not_computed_are_waited_for_only_if_asked() -> None:
    book = Book()
    blocks = book.compute(0, 3)
    loan = book.lend()
    loan.returned = 3
    book.loans.serve()
    assert book.answers == [blocks, None]
    waiting = Book()
    waiting.lend(follow=True)
    waiting.now = FOLLOW_S + 0.1
    waiting.loans.serve()
    assert waiting.answers == [None]


def test_a_loan_without_progress_is_over_before_its_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book()
    blocks = book.compute(0, 10)
    loan = book.lend()
    book.now = LOAN_S - 0.1
    loan.returned = 2
    book.loans.serve()
    book.now += LOAN_S - 0.1
    book.loans.serve()
    assert book.answers == [blocks], "a returned block is progress"
    freed: list[bool] = []
    release = book.pool.release

    def noting(blocks: Sequence[int]) -> None:
        freed.append(loan.over)
        release(blocks)

    monkeypatch.setattr(book.pool, "release", noting)
    book.now += 0.2
    book.loans.serve()
    assert loan.over
    assert freed == [True]
    assert book.answers == [blocks, None]
    assert len(book.crowd()) == BLOCKS


def test_a_cancelled_loan_gives_all_blocks_back() -> None:
    book = Book()
    book.compute(0, 10)
    loan = book.lend()
    loan.cancelled = True
    assert book.loans.pending
    book.loans.serve()
    assert len(book.crowd()) == BLOCKS
    assert not book.loans.pending


def test_most_of_the_pool_is_never_lent() -> None:
    book = Book()
    book.compute(0, 10)
    first, second = book.lend(), book.lend()
    book.pool.check()
    assert first.lent == 10
    assert second.lent == 0, "a quarter of the pool is lent"
    assert not second.over
    first.returned = 10
    book.loans.serve()
    book.loans.serve()
    assert second.lent == 10


# ---- two workers, a socket between them ----


class Memory:
    """Memory of blocks that all parts of a test see: a `SharedMemory` whose blocks hold what a test writes."""

    maps: ClassVar[dict[bytes, "Memory"]] = {}

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.blocks = [bytes([block]) * BLOCK_BYTES for block in range(BLOCKS + 1)]
        self.maps[name] = self
        self.mapped: list[Mapped] = []
        self.room = BLOCKS
        self.during_copy: Callable[[], object] = lambda: None

    def describe(self) -> bytes:
        return self.name

    def map(self, description: bytes) -> "Mapped":
        if description not in self.maps:
            raise CannotShare("this memory cannot be mapped")
        made = Mapped(self.maps[description], self)
        self.mapped.append(made)
        return made


class Mapped:
    """A `MappedPool`."""

    def __init__(self, other: Memory, own: Memory) -> None:
        self.other, self.own, self.closed = other, own, False

    def copy(
        self, places: Sequence[int], into: Sequence[Any] = (), begin: int = 0, end: int | None = None
    ) -> Sequence[bytearray]:
        if self.closed:
            raise CannotShare("closed")
        assert end is None or begin < end
        made = into or [bytearray(BLOCK_BYTES) for _ in places[: self.own.room]]
        layers = slice(LAYER_BYTES * begin, LAYER_BYTES * (LAYERS if end is None else end))
        for place, contents in zip(places, made, strict=False):
            contents[layers] = self.other.blocks[place][layers]
        if any(places):  # Not the measurement.
            self.own.during_copy()
        return made

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """A thread that serves loans, as an engine's does between its steps. A job that needs blocks overwrites them."""

    block_layout = LAYOUT

    def __init__(self, memory: Memory) -> None:
        self.memory, self.pool = memory, BlockPool(BLOCKS)
        self._wake, self._stop = threading.Event(), False
        self.step: dict[bytes, int] = {}
        """The blocks that the running step computes."""
        self.loans = BlockLoans(self.pool, self._wake.set, partial(computing, self.step))
        self._due: list[Callable[[], object]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Has the thread do this, and waits for it."""
        done = threading.Event()
        self._due += [work, done.set]
        self._wake.set()
        assert done.wait(20)

    def compute(self, first: int, count: int) -> None:
        """Computes blocks of the prompt: their contents are their keys'."""

        def publish() -> None:
            for place, block in enumerate(self.pool.take(count), first):
                self.memory.blocks[block] = content(place)
                self.pool.publish(block, KEYS[place])
                self.pool.release([block])

        self.do(publish)

    def begin(self, first: int, count: int) -> None:
        """Begins a step that computes blocks of the prompt."""

        def take() -> None:
            self.step.update(zip(KEYS[first:], self.pool.take(count), strict=False))

        self.do(take)

    def layers(self, computed: int, wrong: bool = False) -> None:
        """So many layers of the step's blocks are computed, and perhaps wrong."""

        def compute() -> None:
            size = 0 if wrong else LAYER_BYTES * computed
            for key, block in self.step.items():
                self.memory.blocks[block] = content(KEYS.index(key))[:size] + b"?" * (BLOCK_BYTES - size)
            self.loans.layers_computed(computed, LAYERS)

        self.do(compute)

    def end(self, failed: bool = False) -> None:
        """The step is over. If it has failed, others use its blocks at once."""

        def publish() -> None:
            for key, block in self.step.items():
                self.memory.blocks[block] = b"!" * BLOCK_BYTES if failed else content(KEYS.index(key))
                if not failed:
                    self.pool.publish(block, key)
            self.pool.release(list(self.step.values()))
            self.step.clear()
            self.loans.serve()
            self.loans.void_parts()

        self.do(publish)

    def overwrite(self) -> None:
        """Runs jobs that use all blocks that can be had."""

        def use() -> None:
            taken = self.pool.take(self.pool.available)
            for block in taken:
                self.memory.blocks[block] = b"!" * BLOCK_BYTES
            self.pool.release(taken)

        self.do(use)

    def lend_blocks(self, loan: BlockLoan) -> None:
        self.loans.add(loan)

    def read_blocks(self, read: Any) -> None:
        read.answer(None)

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
            self.loans.serve()
            self._wake.wait(0.02)
            self._wake.clear()


def content(place: int) -> bytes:
    return KEYS[place] * (BLOCK_BYTES // len(KEYS[place]))


class Service(mesh_grpc.WorkerServicer):
    """A worker that lends blocks. `wire` counts requests for frames."""

    def __init__(self, lender: BlockLender, sender: BlockSender) -> None:
        self.lender, self.sender, self.wire, self.shares = lender, sender, 0, 0

    async def ShareMemory(self, request: mesh.ShareMemoryRequest, context: Any) -> AsyncIterator[Any]:
        self.shares += 1
        async for response in self.lender.share(request):
            yield response

    async def LendBlocks(self, requests: AsyncIterator[mesh.LendBlocksRequest], context: Any) -> AsyncIterator[Any]:
        async for response in self.lender.lend(requests):
            yield response

    async def ReadBlocks(self, request: mesh.ReadBlocksRequest, context: Any) -> AsyncIterator[mesh.ReadBlocksResponse]:
        self.wire += not request.probe_bytes
        async for response in self.sender.send(request):
            yield response


class Scene:
    """A worker that lends, and the tier that another one has of it."""

    def __init__(self, engine: FakeEngine, service: Service, server: rpc.Server, own: Memory, peers: PeerStores):
        self.engine, self.service, self.server, self.own, self.peers = engine, service, server, own, peers
        self.address = f"127.0.0.1:{server.port}"
        self.came: list[Contents] = []

    @property
    def store(self) -> PeerStore:
        return self.peers.at(self.address)

    def ask(self, budget_s: float = 20.0, follow: bool = False) -> tuple[BlockRequest, asyncio.Event]:
        """Requests all blocks. -> the request, and an event for its end."""
        ended = asyncio.Event()

        def answer(request: BlockRequest, payloads: Sequence[Contents] | None) -> None:
            self.came += payloads or ()
            if payloads is None:
                ended.set()

        request = BlockRequest(KEYS, budget_s, answer, follow=follow)
        self.store.fetch(request)
        return request, ended

    def has(self, count: int) -> bool:
        """Whether so many blocks came."""
        return len(self.came) == count

    async def fetch(self, budget_s: float = 20.0) -> int:
        """-> how many blocks came, all of them right."""
        self.came.clear()
        async with asyncio.timeout(30):
            await self.ask(budget_s)[1].wait()
        assert self.came == [content(place) for place in range(len(self.came))]
        return len(self.came)

    def lend_as(self, **changes: Any) -> None:
        """Makes the service lend in another way."""
        values: dict[str, Any] = {"memory": b"lender", "host": HOST, "protected": True, **changes}
        self.service.lender = BlockLender(self.engine, **values)


@asynccontextmanager
async def scenery() -> AsyncIterator[Scene]:
    """Both workers."""
    Memory.maps.clear()
    engine, own = FakeEngine(Memory(b"lender")), Memory(b"borrower")
    service = Service(BlockLender(engine, b"lender", HOST, True), BlockSender(engine, b""))  # type: ignore[abstract]
    server = await rpc.serve(
        "127.0.0.1:0", [rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)]
    )
    executor = ThreadPoolExecutor(1)
    peers = PeerStores(LAYOUT, BLOCK_BYTES, _connect, borrower=Borrower(own, HOST, executor))
    yield Scene(engine, service, server, own, peers)
    await peers.close()
    executor.shutdown()
    await server.stop(0)
    engine.stop()


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    async with scenery() as made:
        yield made


def _connect(address: str) -> aio.Channel:
    return rpc.link_channel(address, "worker")


async def until(condition: Callable[[], object]) -> None:
    """Waits for progress elsewhere."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another thread or task changes it
            await asyncio.sleep(0.005)


async def test_blocks_are_copied_out_of_the_other_workers_memory(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    assert await scene.fetch() == 10
    assert scene.peers.fetches == {"fetched": 2}
    assert scene.peers.received == {"memory": 20}
    assert (scene.service.shares, scene.service.wire) == (1, 0), "the memory is mapped once"
    await until(lambda: scene.engine.pool.active == 0)


async def test_blocks_follow_their_computation(scene: Scene) -> None:
    scene.engine.compute(0, 2)
    _, ended = scene.ask(follow=True)
    for first in (2, 5, 8, 10):
        await until(partial(scene.has, first))
        if first < 10:
            assert not ended.is_set()
            scene.engine.compute(first, min(3, 10 - first))
    await asyncio.wait_for(ended.wait(), 20)
    assert scene.came == [content(place) for place in range(10)]


async def test_blocks_that_are_missing_end_the_fetch(scene: Scene) -> None:
    scene.engine.compute(0, 3)
    assert await scene.fetch() == 3
    assert scene.peers.fetches == {"absent": 1}


async def test_a_small_buffer_is_filled_again_and_again(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    scene.own.room = 3
    assert await scene.fetch() == 10


async def test_a_full_buffer_is_waited_for(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    scene.own.room = 0
    fetching = asyncio.create_task(scene.fetch())
    await until(lambda: scene.engine.pool.active == 10)
    scene.own.room = 10
    assert await fetching == 10


async def test_lent_blocks_do_not_change_while_they_are_copied(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    scene.own.during_copy = scene.engine.overwrite
    assert await scene.fetch() == 10


async def test_copies_of_a_loan_that_was_over_are_not_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The borrower stops for longer than the loan lasts, and then copies what jobs have overwritten."""
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    monkeypatch.setattr(block_loans, "LOAN_S", 0.05)

    def dawdle() -> None:
        """Waits until the blocks are free, and are used by others."""
        while scene.engine.pool.active:
            pass
        scene.engine.overwrite()

    scene.own.during_copy = dawdle
    # A copy that is torn: the first block as it was, the others overwritten.
    torn = Mapped.copy

    def copy(self: Mapped, places: Sequence[int], *rest: Any) -> Sequence[Contents]:
        first = torn(self, places[:1])
        return [*first, *(self.other.blocks[place] for place in places[1:])]

    monkeypatch.setattr(Mapped, "copy", copy)
    assert await scene.fetch() == 0
    assert scene.peers.fetches["revoked"] == 1
    assert scene.peers.received == {"memory": 10}


async def test_nothing_is_confirmed_when_a_loan_is_over(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_loans, "LOAN_S", 0.02)
    scene.engine.compute(0, 10)
    shared = await anext(scene.service.lender.share(mesh.ShareMemoryRequest(host=HOST, layout=LAYOUT.encode())))
    over = asyncio.Event()

    async def requests() -> AsyncIterator[mesh.LendBlocksRequest]:
        yield mesh.LendBlocksRequest(open=mesh.OpenLoan(blocks=OPEN.blocks, memory_id=shared.memory_id))
        await over.wait()
        yield mesh.LendBlocksRequest(copied=10)

    answers = []
    async for answer in scene.service.lender.lend(requests()):
        answers.append(answer)
        if answer.over:
            scene.engine.overwrite()
            over.set()
    assert [(len(answer.places), answer.kept, answer.over) for answer in answers] == [(10, 0, False), (0, 0, True)]


async def test_a_worker_that_ends_while_it_is_copied_from_costs_the_fetch_alone(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    loop = asyncio.get_running_loop()
    scene.own.during_copy = lambda: asyncio.run_coroutine_threadsafe(scene.server.stop(0), loop).result(20)
    assert await scene.fetch() == 0
    assert scene.peers.fetches["failed"] == 1
    await until(lambda: scene.own.mapped[0].closed)


async def test_memory_is_unmapped_as_soon_as_its_worker_is_gone(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    await scene.server.stop(0)
    await until(lambda: scene.own.mapped[0].closed)


async def test_a_new_worker_at_the_address_is_mapped_anew(scene: Scene) -> None:
    """The memory of the first one is still mapped when the second one is asked: the loan names the first one's."""
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    scene.lend_as()
    assert await scene.fetch() == 0
    assert scene.peers.fetches["failed"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "another host"}, "another host"),
        ({"host": ""}, "another host"),
        ({"protected": False}, "authenticated"),
        ({"memory": b""}, "no memory"),
        ({"memory": b"of another kind"}, "cannot be mapped"),
    ],
)
async def test_where_memory_is_not_shared_blocks_come_over_grpc(
    scene: Scene, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(mapped_peer.log, "info", lambda message, **facts: said.append(facts["reason"]))
    scene.lend_as(**changes)
    scene.engine.compute(0, 10)
    for _ in range(2):
        await scene.fetch()
    assert scene.service.wire == 2
    assert scene.service.shares == 1, "it is not asked again at once"
    assert reason in said[0]
    assert scene.engine.pool.active == 0


async def test_a_worker_without_shared_memory_fetches_over_grpc(scene: Scene) -> None:
    scene.peers.borrower = None
    scene.engine.compute(0, 10)
    await scene.fetch()
    assert (scene.service.shares, scene.service.wire) == (0, 1)


async def test_an_abandoned_fetch_gives_the_blocks_back(scene: Scene) -> None:
    scene.engine.compute(0, 4)
    request, ended = scene.ask(follow=True)
    await until(lambda: len(scene.came) == 4)
    request.abandoned = True
    scene.engine.compute(4, 2)
    await asyncio.wait_for(ended.wait(), 20)
    assert scene.peers.fetches == {"abandoned": 1}
    await until(lambda: scene.engine.pool.active == 0)


async def test_an_abandoned_fetch_gives_the_blocks_back_while_the_buffer_is_full(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    scene.own.room = 0
    request, ended = scene.ask()
    await until(lambda: scene.engine.pool.active == 10)
    request.abandoned = True
    await asyncio.wait_for(ended.wait(), 5)
    assert scene.peers.fetches["abandoned"] == 1
    await until(lambda: scene.engine.pool.active == 0)


async def test_a_loan_that_is_over_ends_the_fetch_while_the_buffer_is_full(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    monkeypatch.setattr(block_loans, "LOAN_S", 0.05)
    scene.own.room = 0
    _, ended = scene.ask()
    await asyncio.wait_for(ended.wait(), 5)
    assert scene.peers.fetches["revoked"] == 1


async def test_a_worker_that_was_forgotten_is_not_mapped_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may still hold its store, and fetches from it over gRPC."""
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    forgotten = scene.store
    monkeypatch.setattr(peer_tier, "MOST_PEERS", 1)
    scene.peers.at("127.0.0.1:1")
    await until(lambda: scene.own.mapped[0].closed)
    ended = asyncio.Event()
    forgotten.fetch(BlockRequest(KEYS, 20.0, lambda _, payloads: ended.set() if payloads is None else None))
    await asyncio.wait_for(ended.wait(), 20)
    assert (scene.service.shares, scene.service.wire) == (1, 1)
    assert [pool.closed for pool in scene.own.mapped] == [True]


async def test_a_fetch_that_is_late_gives_the_blocks_back(scene: Scene) -> None:
    scene.engine.compute(0, 10)
    assert await scene.fetch() == 10
    scene.own.room = 0
    assert await scene.fetch(budget_s=0.05) == 0
    assert scene.peers.fetches["late"] == 1
    await until(lambda: scene.engine.pool.active == 0)


# ---- two engines ----


class PoolMemory:
    """The pool of a CPU engine, as a `SharedMemory` for the other engine of this process."""

    pools: ClassVar[dict[bytes, Any]] = {}

    def __init__(self, name: bytes, kv: Any) -> None:
        self.name, self.kv = name, kv
        self.pools[name] = kv

    def describe(self) -> bytes:
        return self.name

    def map(self, description: bytes) -> "MappedEnginePool":
        return MappedEnginePool(self.pools[description])


class MappedEnginePool:
    """Reads the layers of the other engine while it computes."""

    def __init__(self, kv: Any) -> None:
        self.kv = kv

    def copy(
        self, places: Sequence[int], into: Sequence[Any] = (), begin: int = 0, end: int | None = None
    ) -> Sequence[bytearray]:
        size = self.kv.block_bytes // len(self.kv.layers)
        made, end = into or [bytearray(self.kv.block_bytes) for _ in places], end or len(self.kv.layers)
        for place, contents in zip(places, made, strict=True):
            (contents[size * begin : size * end],) = self.kv.read_layers([place], begin, end)
        return made

    def close(self) -> None:
        """Nothing is mapped."""


async def test_an_answer_continues_on_blocks_that_were_copied_while_both_engines_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompts are computed in chunks of 64 tokens by an engine with few blocks, which evicts those of earlier
    prompts; each answer is that of an engine alone."""
    settings = {"kv_blocks": 64, "max_batch_size": 4, "step_tokens": 64, "threads": 1, "deterministic": True}
    engines = [open_engine(SMALL_DEMO, fingerprint=FINGERPRINT, **settings) for _ in range(3)]
    memories = [PoolMemory(name, engine.runner.kv) for name, engine in zip((b"0", b"1"), engines, strict=False)]
    service = Service(BlockLender(engines[0], b"0", HOST, True), BlockSender(engines[0], b""))  # type: ignore[abstract]
    entry = rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)
    server = await rpc.serve("127.0.0.1:0", [entry])
    executor = ThreadPoolExecutor(1)
    borrower = Borrower(memories[1], HOST, executor)
    peers = PeerStores(engines[1].block_layout, engines[1].block_bytes, _connect, borrower=borrower)
    engines[1].use_peers(peers.at)
    monkeypatch.setattr(engines[1].prefixes, "_budget", lambda blocks: 1000.0)
    source = f"127.0.0.1:{server.port}"
    prompts = {key: prompt_of(400 + 16 * key, seed=key) for key in range(1, 6)}
    expected = {key: solo(engines[2], job(key, prompt, max_tokens=6)).tokens for key, prompt in prompts.items()}
    with Running(engines[0]) as first, Running(engines[1]) as second:
        for key, prompt in prompts.items():
            keys = list(block_keys(prompt, 16, chain_root(b"", adapted(FINGERPRINT, b""))))
            engines[1].prefetch(source, keys)
            engines[0].submit(job(key, prompt, max_tokens=2, handoff=True))
            await first.end_of(key)
            token, _ = first.tokens[key]
            engines[1].submit(job(key, prompt, emitted=[token], max_tokens=6, source=source))
            cost = (await second.end_of(key)).cost
            assert [token, *(drawn.token_id for drawn in second.drawn if drawn.key == key)] == expected[key]
            assert cost.fetched_tokens >= len(prompt) - 17
    assert peers.received.keys() == {"memory"}
    for engine in engines[:2]:
        engine.check_integrity()
    await peers.close()
    executor.shutdown()
    await server.stop(0)


OPEN = mesh.OpenLoan(blocks=cache.BlockList(keys=b"".join(KEYS), layout=LAYOUT.encode()))


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (mesh.LendBlocksRequest(), "INVALID_ARGUMENT"),
        (mesh.LendBlocksRequest(copied=1), "INVALID_ARGUMENT"),
        (mesh.LendBlocksRequest(open=OPEN), "FAILED_PRECONDITION"),
        (mesh.LendBlocksRequest(open=mesh.OpenLoan()), "FAILED_PRECONDITION"),
    ],
)
async def test_malformed_loans_are_refused(scene: Scene, message: mesh.LendBlocksRequest, code: str) -> None:
    async def requests() -> AsyncIterator[mesh.LendBlocksRequest]:
        yield message

    with pytest.raises(WeftError) as refused:
        await anext(scene.service.lender.lend(requests()))
    assert refused.value.code.name == code


@pytest.mark.parametrize("copied", [0, 11])
async def test_more_than_was_lent_cannot_be_returned(scene: Scene, copied: int) -> None:
    scene.engine.compute(0, 10)
    shared = await anext(scene.service.lender.share(mesh.ShareMemoryRequest(host=HOST, layout=LAYOUT.encode())))
    opening = mesh.OpenLoan(blocks=OPEN.blocks, memory_id=shared.memory_id)

    lent = asyncio.Event()

    async def requests() -> AsyncIterator[mesh.LendBlocksRequest]:
        yield mesh.LendBlocksRequest(open=opening)
        await lent.wait()
        yield mesh.LendBlocksRequest(copied=copied)

    answers = scene.service.lender.lend(requests())
    assert len((await anext(answers)).places) == 10
    lent.set()
    with pytest.raises(WeftError):
        await anext(answers)
    await until(lambda: scene.engine.pool.active == 0)


def test_a_host_is_known_by_its_boot(tmp_path: Path) -> None:
    assert host.identity(tmp_path) == "", "a system that does not tell"
    boot, machine = tmp_path / "proc/sys/kernel/random/boot_id", tmp_path / "etc/machine-id"
    for file, text in ((boot, "first"), (machine, "one")):
        file.parent.mkdir(parents=True)
        file.write_text(text + "\n")
    known = host.identity(tmp_path)
    assert known == host.identity(tmp_path)
    boot.write_text("second\n")
    assert host.identity(tmp_path) not in ("", known)
    boot.write_text("first\n")
    machine.write_text("another\n")
    assert host.identity(tmp_path) not in ("", known)
