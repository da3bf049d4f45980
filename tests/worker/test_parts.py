"""Layers of blocks that leave while the rest is computed: in order, and void where the step does not succeed."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from protos import mesh_pb2 as mesh
from services.worker.engine.base import BlockLoan, BlockPart, BlockRead, LentBlocks
from services.worker.engine.generation import GenerationEngine
from services.worker.engine.sharing import block_loans
from services.worker.engine.sharing.block_loans import LOAN_S
from services.worker.engine.sharing.block_reads import FOLLOW_S, BlockReads
from services.worker.job import Job
from services.worker.kvcache.loan_copies import LoanCopies
from services.worker.kvcache.pool import LayersComputed
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.planner.block_pool import BlockPool
from services.worker.runners.base import StepResult
from services.worker.runners.cpu.runner import CpuRunner, CpuStep
from services.worker.runners.cuda.layer_events import LayerEvents
from services.worker.runners.step import Words
from tests.checkpoints import SMALL_DEMO
from tests.worker.drive import decoder_of, fail_last_layer, job, open_engine, prompt_of
from tests.worker.test_loans import KEYS, LAYERS, Book, Mapped, Memory, Scene, content, scenery, until
from tests.worker.test_peers import FakePool
from tests.worker.test_slow_links import FINGERPRINT, keys_of

# ---- the lender names layers ----


def part(blocks: Sequence[int], begin: int = 0, end: int | None = None) -> LentBlocks:
    return LentBlocks(list(blocks), begin, end)


class Steps(Book):
    """Steps of which the layers are computed one after another."""

    def begin(self, first: int, count: int) -> list[int]:
        """Begins a step that computes blocks. -> their numbers."""
        blocks = self.pool.take(count)
        self.step.update(zip(KEYS[first:], blocks, strict=False))
        return blocks

    def layers(self, *computed: int) -> None:
        for count in computed:
            self.loans.layers_computed(count, LAYERS)

    def end(self, failed: bool = False) -> None:
        for key, block in self.step.items() if not failed else ():
            self.pool.publish(block, key)
        self.pool.release(list(self.step.values()))
        self.step.clear()
        self.loans.serve()
        self.loans.void_parts()


def test_layers_are_named_once_until_the_blocks_are_lent() -> None:
    book = Steps()
    earlier = book.compute(0, 2)
    loan = book.lend(follow=True, in_parts=True)
    blocks = book.begin(2, 5)
    book.layers(0, 1, 2, 2, 3, 6)  # A part has at least a quarter of the layers.
    assert loan.lent == 2, "blocks of a running step are not lent"
    book.end()
    assert book.parts == [part(earlier), part(blocks, 0, 2), part(blocks, 2, 6), part(blocks, 6)]
    assert not set(book.crowd()) & {*blocks, *earlier}


def test_layers_of_a_step_that_failed_do_not_count() -> None:
    """Though the same blocks are computed once more, by a step of which none were named, or some."""
    book = Steps()
    book.lend(follow=True, in_parts=True)
    first = book.begin(0, 4)
    book.layers(4)
    book.end(failed=True)
    assert book.begin(0, 4) == first
    book.end()
    other = Steps()
    other.lend(follow=True, in_parts=True)
    other.begin(0, 4)
    other.layers(4)
    other.end(failed=True)
    other.begin(0, 4)
    other.layers(2)
    other.end()
    assert book.parts == [part(first, 0, 4), part(first)]
    assert other.parts == [part(first, 0, 4), part(first, 0, 2), part(first, 2)]


def test_a_launch_that_failed_voids_layers_too() -> None:
    book = Steps()
    book.lend(follow=True, in_parts=True)
    blocks = book.begin(0, 4)
    book.layers(4)
    book.loans.void_parts()
    book.layers(4)
    assert book.parts == [part(blocks, 0, 4), part(blocks, 0, 4)]


def test_a_loan_that_is_asked_for_within_a_step_gets_its_layers() -> None:
    book = Steps()
    blocks = book.begin(0, 4)
    book.layers(2)
    loan = BlockLoan(KEYS, True, book.parts.append, in_parts=True)
    book.loans.add(loan)
    book.layers(4)
    book.end()
    assert book.parts == [part(blocks, 0, 4), part(blocks, 4)]


def test_a_borrower_that_takes_no_parts_gets_whole_blocks() -> None:
    book = Steps()
    book.lend(follow=True)
    blocks = book.begin(0, 4)
    book.layers(2, 4, 6)
    book.end()
    assert book.parts == [part(blocks)]


def test_copies_of_blocks_that_are_lent_later_do_not_count() -> None:
    """A quarter of the pool may be lent, and until then nothing holds the rest."""
    book = Steps()
    book.compute(0, 7)
    others = [book.lend(follow=True) for _ in range(2)]
    assert [other.lent for other in others] == [7, 3]
    mine = list[LentBlocks | None]()
    book.loans.add(BlockLoan(KEYS[7:], True, mine.append, in_parts=True))
    blocks = book.begin(7, 3)
    book.layers(4)
    book.end()
    for other in others:
        other.cancelled = True
    book.loans.serve()
    book.loans.serve()
    assert mine == [part(blocks, 0, 4), part(blocks)]


def test_a_step_is_waited_for_as_long_as_its_layers_are_computed() -> None:
    book = Steps()
    loan = book.lend(follow=True, in_parts=True)
    book.begin(0, 4)
    for layers in (2, 4, 6):
        book.now += FOLLOW_S - 0.1
        book.layers(layers)
        book.loans.serve()
    assert not loan.over


def test_blocks_that_are_lent_and_not_returned_end_a_loan_within_a_step() -> None:
    book = Steps()
    book.compute(0, 2)
    loan = book.lend(follow=True, in_parts=True)
    book.begin(2, 4)
    book.layers(2)
    book.now += LOAN_S + 0.1
    book.layers(4)
    book.loans.serve()
    assert loan.over
    assert book.parts[-1] is None


def test_a_request_is_not_over_while_its_blocks_are_computed() -> None:
    now, parts = [0.0], list[Sequence[BlockPart] | None]()
    reads = BlockReads(BlockPool(8), FakePool(), lambda: None, lambda keys: [1], lambda: now[0])
    reads.add(BlockRead(KEYS, True, parts.append, in_parts=True))
    for layers in (2, 4, 6):
        now[0] += FOLLOW_S - 0.1
        reads.layers_computed(layers, LAYERS)
        reads.serve()
    assert len(parts) == 3
    assert None not in parts


# ---- the borrower copies them ----


def computed(memory: Memory, places: Sequence[int], layers: int) -> None:
    """So many layers of these blocks have the contents of the keys, in order."""
    for place, block in enumerate(places):
        whole = content(place)
        size = len(whole) // LAYERS * layers
        memory.blocks[block] = whole[:size] + b"?" * (len(whole) - size)


@pytest.fixture
def memories() -> tuple[Memory, Memory]:
    """The other worker's memory and the own one."""
    return Memory(b"lender"), Memory(b"borrower")


def test_layers_are_copied_to_where_the_block_was_begun(memories: tuple[Memory, Memory]) -> None:
    other, own = memories
    copies, places = LoanCopies(own.map(b"lender")), [7, 3, 5]
    for first, layers in ((0, 2), (2, 6)):
        computed(other, places, layers)
        copies.begin(places, first, layers)
    assert not copies.waiting
    computed(other, places, LAYERS)
    for block in places:  # What is copied is not copied again.
        other.blocks[block] = b"!" * 6 + other.blocks[block][6:]
    copies.lend(places, 6)
    assert copies.copy() == (3, False)
    assert copies.take(3) == [content(0), content(1), content(2)]


def test_layers_that_do_not_count_are_copied_again(memories: tuple[Memory, Memory]) -> None:
    other, own = memories
    copies, places = LoanCopies(own.map(b"lender")), [7, 3, 5]
    copies.begin(places, 0, 4)  # Of a step that fails.
    computed(other, places, 2)
    copies.begin(places, 0, 2)
    computed(other, places, LAYERS)
    copies.lend(places, 2)
    assert copies.copy() == (3, False)
    assert copies.take(3) == [content(0), content(1), content(2)]


def test_layers_of_which_none_count_are_copied_again(memories: tuple[Memory, Memory]) -> None:
    other, own = memories
    copies, places = LoanCopies(own.map(b"lender")), [7, 3, 5]
    copies.begin(places, 0, 4)
    computed(other, places, LAYERS)
    copies.lend(places, 0)
    assert copies.copy() == (3, True)
    assert copies.take(3) == [content(0), content(1), content(2)]


def test_blocks_for_which_there_was_no_room_are_copied_later(memories: tuple[Memory, Memory]) -> None:
    other, own = memories
    copies, places = LoanCopies(own.map(b"lender")), [7, 3, 5]
    computed(other, places, LAYERS)
    own.room = 1
    copies.begin(places, 0, 2)
    copies.begin(places, 2, 4)
    copies.lend(places, 4)
    own.room = 0
    assert copies.copy() == (2, False)
    assert copies.waiting
    own.room = 3
    assert copies.copy() == (1, True)
    assert copies.take(3) == [content(0), content(1), content(2)]


def test_other_blocks_than_before_are_refused(memories: tuple[Memory, Memory]) -> None:
    copies = LoanCopies(memories[1].map(b"lender"))
    copies.begin([7, 3], 0, 2)
    copies.begin([7, 3], 2, 2)
    with pytest.raises(CannotShare, match="other blocks"):
        copies.begin([7, 4], 2, 4)


# ---- two workers, a socket between them ----


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    async with scenery() as made:
        assert await made.fetch() == 0, "the memory is mapped"
        yield made


async def asked(scene: Scene) -> asyncio.Event:
    """Asks for all blocks; the engine has the request. -> an event for its end."""
    _, ended = scene.ask(follow=True)
    await until(lambda: scene.engine.loans._loans)
    return ended


def copies_of(scene: Scene) -> list[None]:
    """Has an element for each copy of the borrower from now on."""
    made: list[None] = []
    scene.own.during_copy = partial(made.append, None)
    return made


async def until_copies(made: list[None], count: int) -> None:
    await until(lambda: len(made) == count)


async def test_layers_are_copied_while_the_others_are_computed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_copied: list[Any] = []
    copy, measured = Mapped.copy, scene.store.link.byte_s

    def noting(self: Mapped, places: Sequence[int], into: Any, *layers: Any) -> Sequence[bytearray]:
        layers_copied.append(layers)
        return copy(self, places, into, *layers)

    monkeypatch.setattr(Mapped, "copy", noting)
    ended, copies = await asked(scene), copies_of(scene)
    scene.engine.begin(0, 10)
    for number, layers in enumerate((2, 4, 6), 1):
        scene.engine.layers(layers)
        await until_copies(copies, number)
    assert not scene.came
    scene.engine.end()
    await asyncio.wait_for(ended.wait(), 20)
    assert scene.came == [content(place) for place in range(10)]
    assert layers_copied == [(0, 2), (2, 4), (4, 6), (6, None)]
    assert scene.store.link.byte_s == measured, "the last part is no measure of the link"
    await until(lambda: scene.engine.pool.active == 0)


@pytest.mark.parametrize("layers", [0, 2])
async def test_a_block_of_a_step_that_failed_is_copied_anew(scene: Scene, layers: int) -> None:
    ended, copies = await asked(scene), copies_of(scene)
    scene.engine.begin(0, 10)
    scene.engine.layers(6, wrong=True)
    await until_copies(copies, 1)
    scene.engine.end(failed=True)
    scene.engine.begin(0, 10)
    if layers:
        scene.engine.layers(layers)
    scene.engine.end()
    await asyncio.wait_for(ended.wait(), 20)
    assert scene.came == [content(place) for place in range(10)]


async def test_a_loan_that_ends_within_a_step_ends_the_fetch(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, copies = await asked(scene), copies_of(scene)
    scene.engine.begin(0, 10)
    scene.engine.layers(4)
    await until_copies(copies, 1)
    monkeypatch.setattr(block_loans, "FOLLOW_S", 0.0)
    scene.engine.end(failed=True)
    for lent in list(scene.engine.loans._loans.values()):
        lent.until = 0.0
    scene.engine.wake()
    await asyncio.wait_for(ended.wait(), 20)
    assert scene.came == []
    assert scene.peers.fetches["absent"] == 2


async def test_a_fetch_that_is_abandoned_within_a_step_ends_the_loan(scene: Scene) -> None:
    request, ended = scene.ask(follow=True)
    await until(lambda: scene.engine.loans._loans)
    copies = copies_of(scene)
    scene.engine.begin(0, 10)
    scene.engine.layers(2)
    await until_copies(copies, 1)
    request.abandoned = True
    scene.engine.layers(4)
    await asyncio.wait_for(ended.wait(), 20)
    await until(lambda: not scene.engine.loans._loans)
    scene.engine.end()
    assert scene.came == []
    assert scene.peers.fetches["abandoned"] == 1
    await until(lambda: scene.engine.pool.active == 0)


async def test_an_earlier_lender_sends_no_parts(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know that it is asked for them."""
    lend = scene.service.lender.lend

    def earlier(requests: AsyncIterator[mesh.LendBlocksRequest]) -> AsyncIterator[mesh.LendBlocksResponse]:
        async def known() -> AsyncIterator[mesh.LendBlocksRequest]:
            async for request in requests:
                if request.WhichOneof("message") == "open":
                    request.open.in_parts = False
                yield request

        return lend(known())

    monkeypatch.setattr(scene.service.lender, "lend", earlier)
    ended, copies = await asked(scene), copies_of(scene)
    scene.engine.begin(0, 10)
    for layers in (2, 4, 6):
        scene.engine.layers(layers)
    scene.engine.end()
    await asyncio.wait_for(ended.wait(), 20)
    assert scene.came == [content(place) for place in range(10)]
    assert len(copies) == 1


# ---- a device's steps ----


class Event:
    """An event of a stream, which a test completes."""

    def __init__(self) -> None:
        self.complete = False

    def query(self) -> bool:
        return self.complete


def test_a_step_is_marked_after_each_quarter_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for layers, expected in ((32, [8, 16, 24]), (6, [2, 4]), (3, [1, 2]), (1, [])):
        model: Any = SimpleNamespace(layers=[None] * layers, between_layers=None)
        pool: Any = SimpleNamespace(call=None)
        events = LayerEvents(model, pool)
        monkeypatch.setattr(events, "_event", Event)
        with events.recorded():
            assert not model.between_layers, "nobody asks"
        pool.call = lambda computed, layers: True
        with events.recorded() as marks:
            for layer in range(layers):
                model.between_layers(layer)
        assert [layer for layer, _ in marks] == expected
        assert model.between_layers is None


def test_layers_are_reported_as_they_are_computed_until_the_step_is_over() -> None:
    seen: list[int] = []
    first, second, done = Event(), Event(), Event()

    def call(computed: int, layers: int) -> bool:
        assert layers == 8
        seen.append(computed)
        event = {1: first, 4: second, 6: done}.get(len(seen))
        if event is not None:
            event.complete = True
        return True

    model, pool = SimpleNamespace(layers=[None] * 8), SimpleNamespace(call=call)
    LayerEvents(model, pool).follow([(2, first), (4, second)], done)  # type: ignore[arg-type]
    assert seen == [0, 2, 2, 2, 4, 4]


def test_nothing_is_polled_where_nobody_waits() -> None:
    seen: list[int] = []

    def call(computed: int, layers: int) -> bool:
        seen.append(computed)
        return False

    pool = SimpleNamespace(call=call)
    events = LayerEvents(SimpleNamespace(layers=[None] * 8), pool)  # type: ignore[arg-type]
    events.follow([(2, Event()), (4, Event())], Event())
    assert seen == [0]
    events.follow([], Event())
    assert seen == [0], "a captured step has no marks"


class DevicePool:
    """The CPU's pool as a device's: it reports no layers by itself."""

    def __init__(self, kv: Any) -> None:
        self._kv, self.beside, self.settled = kv, True, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def on_layers(self, call: LayersComputed) -> None:
        self.call = call


class Device:
    """The CPU's runner with the timing of a GPU: two steps in flight, whose layers are computed while the engine waits
    for the first of them."""

    depth = 2

    def __init__(self, runner: CpuRunner) -> None:
        self._runner, self.kv = runner, DevicePool(runner.kv)
        runner.model.between_layers = None
        self.at: dict[int, Callable[[], object]] = {}
        """What happens when so many layers of the first step are computed."""
        self.failing = 0
        """Steps whose numbers will not be finite."""
        self.followed: list[bool] = []
        """What each report was answered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, words: Words) -> CpuStep:
        return self._runner.launch(words)

    def collect(self, step: CpuStep) -> StepResult:
        layers = len(self._runner.model.layers)
        for computed in range(layers):
            self.at.pop(computed, lambda: None)()
            self.followed.append(self.kv.call(computed, layers))
        result = self._runner.collect(step)
        if self.failing:
            self.failing -= 1
            return result._replace(finite=[False] * len(result.finite))
        return result


class Asked:
    """A request for the blocks of a prompt."""

    def __init__(self, engine: GenerationEngine, prompt: list[int]) -> None:
        self.engine, self.parts, self.ended = engine, list[BlockPart](), threading.Event()
        self.read = BlockRead(keys_of(prompt), True, self._answer, in_parts=True)

    def add(self) -> None:
        self.engine.read_blocks(self.read)

    def _answer(self, parts: Sequence[BlockPart] | None) -> None:
        if parts is None:
            self.ended.set()
            return
        self.parts += parts
        self.read.sent_bytes = self.read.read_bytes

    @property
    def begun(self) -> list[int]:
        """The blocks of which a part came that does not end them."""
        return [part.index for part in self.parts if not part.ends]

    @property
    def contents(self) -> list[bytes]:
        """The blocks as a receiver joins them."""
        whole: dict[int, bytes] = {}
        for part in self.parts:
            before = whole.get(part.index, b"") if part.offset else b""
            assert len(before) == part.offset, "parts come in order"
            whole[part.index] = before + part.contents
        ended = [part.index for part in self.parts if part.ends]
        assert ended == list(range(len(ended)))
        return [whole[index] for index in ended]


def device_engine(**options: Any) -> tuple[GenerationEngine, Device]:
    engine = open_engine(SMALL_DEMO, fingerprint=FINGERPRINT, kv_blocks=64, max_batch_size=4, threads=1, **options)
    assert isinstance(engine.runner, CpuRunner)
    device = Device(engine.runner)
    made = GenerationEngine(
        engine.options, engine.memory, device, (), block_layout=engine.block_layout, block_dtype=engine.block_dtype
    )
    made.use_fingerprint(FINGERPRINT)
    return made, device


def prompt_job(prompt: list[int], key: int = 1) -> Job:
    return job(key, prompt, max_tokens=2, handoff=True)


def finish(engine: GenerationEngine, asked: Asked) -> list[bytes]:
    """Runs the engine until the request is answered. -> what the pool has."""
    while engine.has_work():
        engine.step()
    until_s = time.monotonic() + 60
    while not asked.ended.is_set():
        engine._move_blocks()
        assert time.monotonic() < until_s
    assert engine.runner.kv is not None
    return engine.runner.kv.read(engine.planner.pool.match(asked.read.keys))


def test_parts_of_the_step_that_is_waited_for_come_while_the_next_one_is_in_flight() -> None:
    engine, _ = device_engine(step_tokens=64)
    prompt = prompt_of(200, seed=5)
    asked = Asked(engine, prompt)
    asked.add()
    engine.submit(prompt_job(prompt))
    engine.step()
    assert len(engine._in_flight) == 1
    assert set(asked.begun) == set(range(4)), "the second step's blocks are not computed"
    assert finish(engine, asked) == asked.contents
    assert set(asked.begun) == set(range(12))
    assert len(asked.contents) == 12
    engine.check_integrity()


def test_a_request_within_a_step_gets_its_layers_and_the_blocks_before() -> None:
    engine, device = device_engine(step_tokens=64)
    prompt = prompt_of(200, seed=6)
    asked = Asked(engine, prompt)
    engine.submit(prompt_job(prompt))
    engine.step()
    device.at[0] = asked.add
    engine.step()
    assert [part.index for part in asked.parts if part.ends][:4] == [0, 1, 2, 3]
    assert set(asked.begun) == set(range(4, 8))
    assert finish(engine, asked) == asked.contents


def test_blocks_that_were_written_behind_a_step_are_not_read_within_it() -> None:
    engine, device = device_engine(step_tokens=64)
    prompt = prompt_of(200, seed=6)
    asked = Asked(engine, prompt)
    engine.submit(prompt_job(prompt))
    engine.step()
    device.kv.settled = False
    device.at[0] = asked.add
    engine.step()
    assert asked.begun == []
    assert finish(engine, asked) == asked.contents


def test_the_last_part_of_a_step_that_failed_is_not_sent() -> None:
    engine, device = device_engine(step_tokens=256)
    prompt = prompt_of(200, seed=7)
    asked = Asked(engine, prompt)
    asked.add()
    device.failing = 1
    engine.submit(prompt_job(prompt))
    output = engine.step()
    assert output.ended[0].error is not None
    assert asked.begun
    assert not any(part.ends for part in asked.parts)
    before = len(asked.parts)
    engine.submit(prompt_job(prompt, key=2))
    assert finish(engine, asked) == asked.contents
    first = {index: next(part.offset for part in asked.parts[before:] if part.index == index) for index in range(12)}
    assert set(first.values()) == {0}, "they begin anew"


def test_blocks_of_a_job_that_has_ended_are_not_read_while_its_last_step_runs() -> None:
    engine, _ = device_engine(step_tokens=64)
    prompt = prompt_of(200, seed=8)
    asked = Asked(engine, prompt)
    engine.submit(prompt_job(prompt))
    engine.step()
    assert engine._in_flight
    engine.cancel(1)
    asked.add()
    engine.step()
    assert asked.begun == []
    engine.check_integrity()


def test_a_step_is_followed_for_a_prompt_that_is_handed_off_and_for_requests_alone() -> None:
    engine, device = device_engine(step_tokens=256)
    engine.submit(job(1, prompt_of(100, seed=9), max_tokens=1))
    engine.step()
    assert set(device.followed) == {False}
    device.followed.clear()
    engine.submit(prompt_job(prompt_of(100, seed=10), key=2))
    engine.step()
    assert set(device.followed) == {True}
    device.followed.clear()
    Asked(engine, prompt_of(100, seed=11)).add()
    engine.submit(job(3, prompt_of(100, seed=12), max_tokens=1))
    engine.step()
    assert set(device.followed) == {True}


def test_a_request_that_is_cancelled_within_a_step_ends() -> None:
    engine, device = device_engine(step_tokens=256)
    prompt = prompt_of(100, seed=13)
    asked = Asked(engine, prompt)
    asked.add()

    def cancel() -> None:
        asked.read.cancelled = True

    device.at[1] = cancel
    engine.submit(prompt_job(prompt))
    engine.step()
    assert asked.ended.is_set()
    assert not any(part.ends for part in asked.parts)


def test_loans_follow_the_layers_of_an_engine() -> None:
    engine, device = device_engine(step_tokens=64)
    prompt = prompt_of(200, seed=14)
    keys, lent = keys_of(prompt), list[LentBlocks | None]()
    loan = BlockLoan(keys, True, lent.append, in_parts=True)
    engine.submit(prompt_job(prompt))
    device.at[1] = partial(engine.lend_blocks, loan)
    engine.step()
    named = [each for each in lent if each is not None]
    blocks = engine.planner.pool.match(keys)
    layers = len(device._runner.model.layers)
    assert blocks == list(named[-1].blocks)
    assert (named[-1].end, len(blocks)) == (None, 4)
    assert [(list(each.blocks), each.end) for each in named[:-1]] == [(blocks, end) for end in range(1, layers)], (
        "a layer each"
    )
    assert named[-1].begin == layers - 1
    loan.cancelled = True
    while engine.has_work():
        engine.step()
    engine.check_integrity()


def test_layers_of_blocks_that_are_not_lent_after_their_step_do_not_count() -> None:
    """A quarter of the pool is lent: of these blocks none is."""
    engine, device = device_engine(step_tokens=512)
    other, prompt = prompt_of(260, seed=15), prompt_of(200, seed=16)
    held, lent = list[LentBlocks | None](), list[LentBlocks | None]()
    holding = BlockLoan(keys_of(other), True, held.append)
    loan = BlockLoan(keys_of(prompt), True, lent.append, in_parts=True)
    engine.lend_blocks(holding)
    engine.submit(prompt_job(other))
    engine.step()
    assert holding.lent == 16
    device.at[0] = partial(engine.lend_blocks, loan)
    engine.submit(prompt_job(prompt, key=2))
    engine.step()
    assert lent
    assert loan.lent == 0
    holding.cancelled = True
    engine._move_blocks()
    engine._move_blocks()
    assert lent[-1] == part(engine.planner.pool.match(loan.keys))


def test_layers_of_a_launch_that_failed_are_read_again() -> None:
    """Its rows are launched once more, in halves, before anything is published."""
    engine = open_engine(SMALL_DEMO, fingerprint=FINGERPRINT, kv_blocks=64, threads=1, step_tokens=256)
    fail_last_layer(decoder_of(engine).model)
    prompt = prompt_of(100, seed=17)
    asked = Asked(engine, prompt)
    asked.add()
    engine.submit(prompt_job(prompt))
    engine.submit(prompt_job(prompt_of(100, seed=18), key=2))
    while not asked.ended.is_set():
        engine.step()
        engine._move_blocks()
    offsets = [each.offset for each in asked.parts if each.index == 0]
    assert offsets[:2] == [0, 0]
    assert len(asked.contents) == 6
