"""Blocks that travel in fp8 between two real engines whose pools have 16 or 32 bits, over a real socket.

`python -m tests.worker.test_fp8_fetches` prints the second table of bench/ledger/0325-fp8-on-the-wire.md.
"""

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from tokenizers import Tokenizer

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.block_messages import Rounding
from services.hashing import adapted, block_keys, chain_root
from services.worker.build.choose import build_engine
from services.worker.build.load import load_model
from services.worker.build.share_blocks import rounding_of
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.kvcache.mapped_peer import Borrower
from services.worker.kvcache.peer_tier import PeerStore, PeerStores
from services.worker.kvcache.tiers import BlockRequest, Contents
from services.worker.options import EngineOptions
from services.worker.service.block_lender import BlockLender
from services.worker.service.block_sender import BlockSender
from services.worker.settings import WorkerSettings
from tests.checkpoints import SMALL_DEMO
from tests.mesh.test_prefixes import tale
from tests.worker.drive import Answer, job, open_engine, prompt_of, solo
from tests.worker.test_loans import HOST, PoolMemory, Service
from tests.worker.test_slow_links import FINGERPRINT, Running
from tests.worker.test_tiers import slow_prefill
from weft.launch.demo_model import model_folder

SECRET = b"s" * 32
PROMPT = prompt_of(200, 24)
"""Each token of its answer is far likelier than the next likely one, on any processor."""
KEYS = list(block_keys(PROMPT, 16, chain_root(b"", adapted(FINGERPRINT, b""))))
SETTINGS: dict[str, Any] = {"kv_blocks": 64, "max_batch_size": 4, "threads": 1}


Change = Callable[[mesh.ReadBlocksResponse], None]


class Lender(Service):
    """A worker that lends blocks. It counts bytes, and a test may change what it sends."""

    def __init__(self, lender: BlockLender, sender: BlockSender) -> None:
        super().__init__(lender, sender)
        self.bytes = 0
        self.change: Change = lambda response: None

    async def ReadBlocks(self, request: mesh.ReadBlocksRequest, context: Any) -> AsyncIterator[mesh.ReadBlocksResponse]:
        async for response in self.sender.send(request):
            if not request.probe_bytes:
                self.bytes += sum(len(piece.data) for piece in response.pieces)
                self.change(response)
            yield response


@dataclass
class Scene:
    """An engine that has computed a prompt, and what another one of the same layout knows of it."""

    engine: GenerationEngine
    service: Lender
    peers: PeerStores
    address: str

    @property
    def store(self) -> PeerStore:
        return self.peers.at(self.address)

    @property
    def exact(self) -> list[bytes]:
        """The contents of the prompt's blocks."""
        assert self.engine.runner.kv is not None
        return self.engine.runner.kv.read(self.engine.planner.pool.match(KEYS))

    @property
    def rounded(self) -> list[bytes]:
        """The same, rounded."""
        own = rounding_of(self.engine)
        assert own is not None
        return [own.expand(own.round(contents)) for contents in self.exact]

    async def fetch(self) -> list[Contents]:
        """The contents that come."""
        came: list[Contents] = []
        ended = asyncio.Event()

        def answer(request: BlockRequest, payloads: Sequence[Contents] | None) -> None:
            came.extend(payloads or ())
            if payloads is None:
                ended.set()

        self.store.fetch(BlockRequest(KEYS, 60.0, answer))
        async with asyncio.timeout(60):
            await ended.wait()
        return came


@asynccontextmanager
async def scene(
    sends: bool = True, asks: bool = True, memory: bool = False, folder: Path = SMALL_DEMO, **options: Any
) -> AsyncIterator[Scene]:
    """sends: the lender knows fp8. asks: the other worker asks for it. memory: it can map the lender's pool."""
    engine = open_engine(folder, fingerprint=FINGERPRINT, **{**SETTINGS, **options})
    own = rounding_of(engine)
    solo(engine, job(1, PROMPT, max_tokens=1))
    service = Lender(BlockLender(engine, b"0", HOST, True), BlockSender(engine, SECRET, own if sends else None))  # type: ignore[abstract]
    entry = rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)
    server = await rpc.serve("127.0.0.1:0", [entry])
    executor = ThreadPoolExecutor(1)
    shared = PoolMemory(b"0", engine.runner.kv)
    borrower = Borrower(shared, HOST, executor) if memory else None
    asked: Rounding | None = own if asks else None
    peers = PeerStores(engine.block_layout, engine.block_bytes, _connect, SECRET, (), borrower, asked)
    with Running(engine):
        yield Scene(engine, service, peers, f"127.0.0.1:{server.port}")
    await peers.close()
    executor.shutdown()
    await server.stop(0)


def _connect(address: str) -> aio.Channel:
    return rpc.link_channel(address, "worker")


# ---- what comes ----


@pytest.mark.parametrize(("dtype", "share"), [("float32", 3.9), ("bfloat16", 1.95), ("float16", 1.95)])
async def test_blocks_come_rounded_in_few_bytes(dtype: str, share: float) -> None:
    async with scene(dtype=dtype) as one:
        came = await one.fetch()
        assert came == one.rounded != one.exact
        assert len(came) == len(KEYS)
        assert one.service.bytes < sum(map(len, one.exact)) / share
        assert one.peers.fetches == {"fetched": 1}


@pytest.mark.parametrize(("sends", "asks"), [(False, True), (True, False), (False, False)])
async def test_an_older_worker_on_either_side_exchanges_exact_blocks(sends: bool, asks: bool) -> None:
    """A worker of an earlier version neither asks for a format nor states one."""
    async with scene(sends, asks) as one:
        assert await one.fetch() == one.exact
        assert one.peers.fetches == {"fetched": 1}


async def test_blocks_out_of_mapped_memory_stay_exact() -> None:
    async with scene(memory=True) as one:
        assert await one.fetch() == one.exact
        assert one.peers.received == {"memory": len(KEYS)}


async def test_blocks_that_were_rounded_before_are_lent_unchanged() -> None:
    """By a worker that fetched them itself."""
    async with scene() as one:
        pool, kv = one.engine.planner.pool, one.engine.runner.kv
        assert kv is not None
        kv.write(pool.match(KEYS), one.rounded)
        assert await one.fetch() == one.exact


def _flip(response: mesh.ReadBlocksResponse) -> None:
    piece = response.pieces[3]
    piece.data = bytes([*piece.data[:-1], piece.data[-1] ^ 1])


def _exact(response: mesh.ReadBlocksResponse) -> None:
    response.format = mesh.BLOCK_FORMAT_UNSPECIFIED


def _unknown(response: mesh.ReadBlocksResponse) -> None:
    response.format = 7  # type: ignore[assignment]


@pytest.mark.parametrize("change", [_flip, _exact, _unknown])
async def test_a_block_that_is_not_what_its_message_states_is_damage(change: Change) -> None:
    async with scene() as one:
        one.service.change = change
        assert await one.fetch() == [], "all blocks are in one message"
        assert one.peers.fetches == {"damaged": 1}


async def test_a_format_that_was_not_asked_for_is_damage() -> None:
    def rounded(response: mesh.ReadBlocksResponse) -> None:
        response.format = mesh.BLOCK_FORMAT_FP8

    async with scene(asks=False) as one:
        one.service.change = rounded
        assert await one.fetch() == []
        assert one.peers.fetches == {"damaged": 1}


@pytest.mark.parametrize("wrong", [b"", b"\x7f" * 500, b"short"])
async def test_rounded_contents_that_cannot_be_expanded_are_damage(wrong: bytes) -> None:
    """They are in an intact frame, as a worker with a fault would send them."""

    class Faulty:
        rounded_bytes = 500

        def round(self, contents: bytes) -> bytes:
            return wrong

        def expand(self, rounded: bytes) -> bytes:
            raise AssertionError

    async with scene() as one:
        one.service.sender = BlockSender(one.engine, SECRET, Faulty())
        assert await one.fetch() == []
        assert one.peers.fetches == {"damaged": 1}


# ---- the budget ----


@pytest.mark.parametrize(("sends", "asks", "fetches"), [(True, True, True), (False, True, False), (True, False, False)])
async def test_the_budget_counts_the_bytes_that_really_travel(sends: bool, asks: bool, fetches: bool) -> None:
    """A link on which exact blocks take twice as long as computing them, and rounded ones half as long."""
    async with scene(sends, asks) as one:
        await one.fetch()
        assert one.store._rounds == (sends and asks)
        link = one.store.link
        link.latency_s, link.byte_s = 0.0, 1e-6
        computing_s = len(KEYS) * one.peers.block_bytes * 1e-6 / 2
        assert one.store.is_faster(len(KEYS), computing_s) == fetches


async def test_measuring_a_link_shows_what_the_other_worker_sends() -> None:
    """So that the first fetch is not begun over a link that is too slow for exact blocks."""
    async with scene(sends=False) as one:
        expected = [one.store._rounds]
        await one.store._measure()
        assert [*expected, one.store._rounds] == [True, False]
        assert one.service.bytes == 0


# ---- answers on rounded blocks ----


async def _continued(one: Scene, options: dict[str, Any]) -> tuple[GenerationEngine, Answer]:
    """The answer of a second engine that fetches the prompt."""
    second = open_engine(SMALL_DEMO, fingerprint=FINGERPRINT, **options)
    second.use_peers(one.peers.at)
    slow_prefill(second, rate=1.0)
    asked = job(5, PROMPT, max_tokens=8, logprobs=5, source=one.address)
    return second, await asyncio.to_thread(solo, second, asked)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_answer_on_rounded_blocks_is_nearly_the_exact_one(dtype: str) -> None:
    """Log-probabilities change by at most 0.3; blocks of zeros change them by more."""
    options = {**SETTINGS, "dtype": dtype, "fetch_dtype": "fp8"}
    exact = solo(open_engine(SMALL_DEMO, **options), job(5, PROMPT, max_tokens=8, logprobs=5))
    assert all(top[0][1] - top[1][1] > 2 * 0.3 for top in exact.tops if top), "tokens could change places"
    async with scene(**options) as one:
        _, found = await _continued(one, options)
        assert found.ended.cost.fetched_tokens == len(KEYS) * 16
        assert found.tokens == exact.tokens
        changes = _changes(found, exact)
        assert 0 < max(changes) < 0.3
        kv = one.engine.runner.kv
        assert kv is not None
        kv.write(one.engine.planner.pool.match(KEYS), [bytes(kv.block_bytes)] * len(KEYS))
        _, zeros = await _continued(one, options)
        assert max(_changes(zeros, exact), default=math.inf) > 0.3


def _changes(found: Answer, other: Answer) -> list[float]:
    """Of the log-probabilities of the likeliest first tokens, as far as both have them."""
    tops, others = dict(found.tops[0] or ()), dict(other.tops[0] or ())
    return [abs(logprob - tops[token]) for token, logprob in others.items() if token in tops]


async def test_two_models_never_share_rounded_blocks(tmp_path: Path) -> None:
    """The format is part of the model's fingerprint, as KV_DTYPE is: keys of blocks, in every tier, and results in the
    cache differ from those of workers that fetch exact blocks. So does what the scheduler takes for one model."""
    made = {
        fetched: load_model(
            WorkerSettings(model=str(SMALL_DEMO), engine="torch", kv_blocks=64, fetch_dtype=fetched),
            "m",
            lambda *_: None,
        )
        for fetched in ("auto", "fp8")
    }
    keys = {
        fetched: set(block_keys(PROMPT, 16, chain_root(b"", adapted(model.card.fingerprint, b""))))
        for fetched, model in made.items()
    }
    assert made["auto"].card.fingerprint != made["fp8"].card.fingerprint
    assert not keys["auto"] & keys["fp8"]


# ---- who may ask for them ----


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"deterministic": True}, "fetch_dtype: WEFT_DETERMINISTIC promises that fetched blocks change no bit"),
        ({"kv_dtype": "fp8"}, "WEFT_FETCH_DTYPE=fp8 is for pools of 16 or 32 bits"),
        ({"kv_dtype": "int8"}, "WEFT_FETCH_DTYPE=fp8 is for pools of 16 or 32 bits"),
    ],
)
def test_what_cannot_be_rounded_refuses_the_setting_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        build_engine(SMALL_DEMO, EngineOptions(engine="torch", fetch_dtype="fp8", **options), lambda *_: None)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_setting_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_FETCH_DTYPE", "fp8")
    assert WorkerSettings().fetch_dtype == "fp8"


# ---- the table ----


def _likeliest(engine: GenerationEngine, key: int, prompt: list[int]) -> Answer:
    """The next token, and the log-probabilities of the five likeliest."""
    return solo(engine, job(key, prompt, max_tokens=1, logprobs=5))


def _on_rounded(engine: GenerationEngine, key: int, prompt: list[int]) -> Answer:
    """The same, once the blocks of the prompt are rounded as a link rounds them."""
    _likeliest(engine, key, prompt)
    own, kv = rounding_of(engine), engine.runner.kv
    assert own is not None
    assert kv is not None
    blocks = engine.planner.pool.match(block_keys(prompt, 16, chain_root(b"", adapted(b"", b""))))
    kv.write(blocks, [own.expand(own.round(contents)) for contents in kv.read(blocks)])
    return _likeliest(engine, key + 1, prompt)


def table(prompts: int = 40) -> None:
    """Prints by how much formats change the log-probabilities of the five likeliest next tokens of the demo model."""
    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.encode(tale(500 + number, 300)).ids[:400] for number in range(prompts)]
    print("| pool | blocks | mean change | largest mean of a prompt | same next token |\n|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        options: dict[str, Any] = {**SETTINGS, "kv_blocks": 256, "dtype": dtype}
        reference = open_engine(folder, **options)
        exact = [_likeliest(reference, number, text) for number, text in enumerate(texts)]
        pool = {"kv_dtype": "fp8"}
        formats = {"on the link": {}, "KV_DTYPE=fp8": pool, "dynamic": {**pool, "kv_scales": "dynamic"}}
        for name, more in formats.items():
            engine, compute = open_engine(folder, **options, **more), _likeliest if more else _on_rounded
            found = [compute(engine, 2 * number, text) for number, text in enumerate(texts)]
            changes = [statistics.fmean(_changes(*both)) for both in zip(found, exact, strict=True)]
            same = sum(one.tokens == other.tokens for one, other in zip(found, exact, strict=True))
            cells = f"{statistics.fmean(changes):.3f} | {max(changes):.2f} | {same} of {prompts}"
            print(f"| {dtype} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    table()
