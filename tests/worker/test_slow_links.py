"""Blocks are fetched from another worker where that is faster than computing them, and not where it is slower.

Two real engines, a real socket and a shaped link between them. `python -m tests.worker.test_slow_links` prints the
tables of bench/ledger/0210-handoff-over-slow-links.md and bench/ledger/0325-fp8-on-the-wire.md, with the argument
`parts` that of bench/ledger/0387-layers-on-the-way.md.
"""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest
import torch
from grpc import aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.hashing import adapted, block_keys, chain_root
from services.worker.build.share_blocks import rounding_of
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Ended, StepOutput, TokenOut
from services.worker.kvcache.peer_tier import PeerStores
from services.worker.service.block_sender import BlockSender
from tests.checkpoints import Shape, make_checkpoint
from tests.faults.proxy import Proxy
from tests.ports import free_port
from tests.worker.drive import decoder_of, fail_last_layer, job, open_engine, prompt_of
from tests.worker.test_peers import Service
from tests.worker.test_tiers import slow_prefill
from weft.launch.demo_model import model_folder

FINGERPRINT = b"the same model"
DELAY_S = 0.01
"""In each direction."""
TOKENS = 640
MBIT_S = 1e6 / 8


def keys_of(prompt: list[int]) -> list[bytes]:
    """The keys of a prompt's blocks."""
    return list(block_keys(prompt, 16, chain_root(b"", adapted(FINGERPRINT, b""))))


@dataclass
class Running:
    """An engine in a thread of its own, as `EngineEvents`."""

    engine: GenerationEngine
    tokens: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The first token of each job, and when it came."""
    drawn: list[TokenOut] = field(default_factory=list)
    ended: dict[int, Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.engine.run, args=(self, self._stop), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.engine.wake()
        self._thread.join()

    def launched(self, predicted_s: float) -> None:
        """Not of interest."""

    def begun(self, output: StepOutput) -> None:
        self.stepped(output)

    def stepped(self, output: StepOutput) -> None:
        self.drawn += output.tokens
        for token in output.tokens:
            self.tokens.setdefault(token.key, (token.token_id, time.monotonic()))
        self.ended.update({ended.key: ended for ended in output.ended})

    async def end_of(self, key: int) -> Ended:
        async with asyncio.timeout(120):
            while key not in self.ended:  # noqa: ASYNC110 - another thread changes it
                await asyncio.sleep(0.001)
        return self.ended[key]


@dataclass(frozen=True)
class Handoff:
    """What a handoff took."""

    seconds: float
    """From the first token to the second."""
    fetched_tokens: int
    computed_tokens: int
    tokens: tuple[int, int]


class Pair:
    """A worker for prompts and one for answers, with a shaped link from the first to the second."""

    def __init__(self, first: Running, second: Running, peers: PeerStores, proxy: Proxy, service: Service) -> None:
        self.first, self.second, self.peers, self.proxy, self.service = first, second, peers, proxy, service
        self._key = 0

    def contents(self, running: Running) -> list[bytes]:
        """Those of the blocks of the last prompt, as a worker has them."""
        engine = running.engine
        assert engine.runner.kv is not None
        return engine.runner.kv.read(engine.planner.pool.match(keys_of(prompt_of(TOKENS, seed=self._key))))

    @property
    def rate(self) -> float:
        """Prompt tokens that the second worker computes in a second."""
        return self.second.engine.step_times.prefill_rate

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values of a token on the link."""
        rounding = self.peers.rounding
        block_bytes = self.peers.block_bytes if rounding is None else rounding.rounded_bytes
        return block_bytes / self.second.engine.options.block_size

    def shape(self, bytes_per_s: float) -> None:
        """Makes the link so fast, and forgets what was measured of it."""
        self.proxy.delay(DELAY_S)
        self.proxy.narrow(bytes_per_s)
        self.peers._stores.clear()

    async def measure(self) -> None:
        """Waits until the link is measured, which its first use begins."""
        await self.run(tokens=96)
        async with asyncio.timeout(60):
            while not self.peers.at(self.proxy.address).link.known:  # noqa: ASYNC110 - no event is set
                await asyncio.sleep(0.01)

    async def run(self, fetches: bool = True, tokens: int = TOKENS, ahead: bool = True) -> Handoff:
        """Computes a prompt at one worker and continues it at the other. `fetches`: may fetch blocks; `ahead`: before
        the job arrives, too."""
        self._key += 1
        key, source = self._key, self.proxy.address if fetches else ""
        prompt = prompt_of(tokens, seed=key)
        if fetches and ahead:
            self.second.engine.prefetch(source, keys_of(prompt))
        self.first.engine.submit(job(key, prompt, max_tokens=2, handoff=True))
        await self.first.end_of(key)
        token, at = self.first.tokens[key]
        self.second.engine.submit(job(key, prompt, emitted=[token], max_tokens=2, source=source))
        cost = (await self.second.end_of(key)).cost
        second, then = self.second.tokens[key]
        return Handoff(then - at, cost.fetched_tokens, cost.prefill_tokens, (token, second))


@asynccontextmanager
async def pair(folder: Path, **options: Any) -> AsyncIterator[Pair]:
    """Two engines of a model, the second of which knows how fast it computes. It asks for fp8 if the options say so."""
    settings = {"kv_blocks": 1024, "max_batch_size": 8, "step_tokens": 64, "threads": 1, **options}
    engines = [open_engine(folder, fingerprint=FINGERPRINT, **settings) for _ in range(2)]
    service = Service(engines[0])  # type: ignore[abstract]
    rounding = rounding_of(engines[0])
    service.sender = BlockSender(engines[0], b"", rounding)
    entry = rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)
    server = await rpc.serve("127.0.0.1:0", [entry])
    asked = rounding if engines[1].options.fetch_dtype == "fp8" else None
    peers = PeerStores(engines[1].block_layout, engines[1].block_bytes, _connect, rounding=asked)
    engines[1].use_peers(peers.at)
    async with Proxy(free_port(), server.port) as proxy:
        with Running(engines[0]) as first, Running(engines[1]) as second:
            made = Pair(first, second, peers, proxy, service)
            for _ in range(2):
                await made.run(fetches=False, tokens=256)
            yield made
        await peers.close()
    await server.stop(0)


def _connect(address: str) -> aio.Channel:
    return rpc.link_channel(address, "worker")


async def test_the_budget_weighs_the_link_against_the_speed_of_computing() -> None:
    """Over one link of 100 Mbit/s and 20 ms. What the second worker believes of its own speed is set, so that a busy
    machine changes nothing."""
    async with pair(model_folder()) as workers:
        workers.shape(100 * MBIT_S)
        slow_prefill(workers.second.engine, rate=50.0)
        await workers.measure()
        fetched = await workers.run()
        assert fetched.fetched_tokens >= TOKENS - 16
        assert fetched.computed_tokens <= 17
        slow_prefill(workers.second.engine, rate=1e6)
        computed = await workers.run()
        assert computed.fetched_tokens == 0
        assert computed.computed_tokens == TOKENS + 1


@pytest.mark.parametrize("fetch_dtype", ["auto", "fp8"])
async def test_between_the_two_break_evens_only_blocks_in_fp8_are_fetched(fetch_dtype: str) -> None:
    """Over one link of 20 Mbit/s and 20 ms a token takes 2.5 ms in float32 and 0.6 in fp8. What the second worker
    believes of its own speed, between them, and of the link is set, so that a busy machine changes nothing."""
    async with pair(model_folder(), fetch_dtype=fetch_dtype) as workers:
        workers.shape(20 * MBIT_S)
        slow_prefill(workers.second.engine, rate=400.0)
        await workers.measure()
        link = workers.peers.at(workers.proxy.address).link
        link.latency_s, link.byte_s = 2 * DELAY_S, 1 / (20 * MBIT_S)
        done = await workers.run(ahead=False)
        if fetch_dtype == "auto":
            assert (done.fetched_tokens, done.computed_tokens) == (0, TOKENS + 1)
        else:
            assert done.fetched_tokens >= TOKENS - 16
            assert done.computed_tokens <= 17
            assert workers.peers.received.keys() == {"grpc_fp8"}


@pytest.mark.parametrize("fetch_dtype", ["auto", "fp8"])
async def test_layers_of_a_prompt_of_one_step_travel_while_it_is_computed(fetch_dtype: str) -> None:
    offsets = set[int]()
    async with pair(model_folder(), step_tokens=TOKENS, fetch_dtype=fetch_dtype) as workers:
        slow_prefill(workers.second.engine, rate=50.0)
        await workers.measure()
        workers.service.damage = lambda response: offsets.add(response.offset)
        done = await workers.run()
        assert done.fetched_tokens >= TOKENS - 16
        assert len(offsets) > 1
        sent, received = workers.contents(workers.first), workers.contents(workers.second)
        if (rounding := workers.peers.rounding) is not None:
            sent = [rounding.expand(rounding.round(each)) for each in sent]
        fetched = done.fetched_tokens // 16
        assert received[:fetched] == sent[:fetched]


async def test_layers_of_a_step_that_failed_are_sent_again() -> None:
    sent: list[mesh.ReadBlocksResponse] = []
    """The messages with parts of the first block."""

    def record(response: mesh.ReadBlocksResponse) -> None:
        sent.extend([response] if any(not piece.index for piece in response.pieces) else [])

    async with pair(model_folder(), step_tokens=TOKENS) as workers:
        first, model = workers.first, decoder_of(workers.first.engine).model
        await workers.measure()
        workers.service.damage = record
        prompt = prompt_of(TOKENS, seed=1000)
        workers.second.engine.prefetch(workers.proxy.address, keys_of(prompt))
        async with asyncio.timeout(60):
            while not first.engine._sharing.reads._reads:  # noqa: ASYNC110 - another thread changes it
                await asyncio.sleep(0.005)
        fail_last_layer(model)
        first.engine.submit(job(1000, prompt, max_tokens=2, handoff=True))
        assert (await first.end_of(1000)).error is not None
        first.engine.submit(job(1001, prompt, max_tokens=2, handoff=True))
        async with asyncio.timeout(60):
            while not (sent and not sent[-1].partial):  # noqa: ASYNC110 - a socket changes it
                await asyncio.sleep(0.005)
        assert [message.offset for message in sent].count(0) == 2
        assert len(sent) > 2


# ---- the table ----


@contextmanager
def patience(workers: Pair) -> Iterator[None]:
    """Fetches at any price."""
    prefixes = workers.second.engine.prefixes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefixes, "_budget", lambda blocks: 1000.0)
        yield


WIDE = Shape(
    "llama",
    {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
     "num_hidden_layers": 4, "max_position_embeddings": 2048},
)  # fmt: skip
"""Little to compute for each byte of keys and values."""
HEAD = "model, KV | bytes a token | link Mbit/s | break-even Mbit/s | fetched | gap ms: chosen | all fetched | computed"


async def table(folder: Path, rounds: int = 3) -> None:
    """Prints a row for each model and link, with the shortest gaps: a busy machine only adds to them."""
    print(f"| {HEAD} |\n|{'---|' * (HEAD.count('|') + 1)}", flush=True)
    models: list[tuple[str, Path, dict[str, Any]]] = [
        ("demo", model_folder(), {}),
        ("demo, fp8 on the link", model_folder(), {"fetch_dtype": "fp8"}),
        ("demo, bf16", model_folder(), {"dtype": "bfloat16"}),
        ("demo, bf16, fp8 on the link", model_folder(), {"dtype": "bfloat16", "fetch_dtype": "fp8"}),
        ("demo, fp8", model_folder(), {"kv_dtype": "fp8"}),
        ("wide", make_checkpoint(folder, WIDE), {"step_tokens": 256}),
    ]
    for name, checkpoint, options in models:
        async with pair(checkpoint, **options) as workers:
            for mbit in (10, 40, 100, 1000):
                print(await _row(name, workers, mbit, rounds), flush=True)


async def _row(name: str, workers: Pair, mbit: int, rounds: int) -> str:
    chosen, fetched, computed = [], [], []
    for _ in range(rounds):
        workers.shape(mbit * MBIT_S)
        await workers.measure()
        chosen.append(await workers.run())
        with patience(workers):
            fetched.append(await workers.run())
        computed.append(await workers.run(fetches=False))
    share = sum(each.fetched_tokens for each in chosen) / (rounds * TOKENS)
    even = workers.token_bytes * workers.rate / MBIT_S
    gaps = " | ".join(f"{1e3 * min(one.seconds for one in each):.0f}" for each in (chosen, fetched, computed))
    return f"| {name} | {workers.token_bytes:.0f} | {mbit} | {even:.0f} | {share:.0%} | {gaps} |"


async def parts_table(rounds: int = 3) -> None:
    """Prints the shortest gaps with blocks in parts, and whole, for prompts of ten steps and of one."""
    print(
        "| on the link | tokens of a step | Mbit/s | gap ms: in parts | whole | computed |\n|---|---|---|---|---|---|"
    )
    for fetch_dtype in ("auto", "fp8"):
        for step_tokens in (64, TOKENS):
            async with pair(model_folder(), step_tokens=step_tokens, fetch_dtype=fetch_dtype) as workers:
                for mbit in (20, 50, 100, 1000):
                    workers.shape(mbit * MBIT_S)
                    await workers.measure()
                    gaps = " | ".join([f"{1e3 * gap:.0f}" for gap in await _gaps(workers, rounds)])
                    print(f"| {fetch_dtype} | {step_tokens} | {mbit} | {gaps} |", flush=True)


async def _gaps(workers: Pair, rounds: int) -> tuple[float, float, float]:
    parts, whole, computed = [], [], []
    for _ in range(rounds):
        with patience(workers):
            parts.append((await workers.run()).seconds)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(decoder_of(workers.first.engine).model, "between_layers", None)
                whole.append((await workers.run()).seconds)
        computed.append((await workers.run(fetches=False)).seconds)
    return min(parts), min(whole), min(computed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["parts"]:
        asyncio.run(parts_table())
    else:
        with TemporaryDirectory() as place:
            asyncio.run(table(Path(place)))
