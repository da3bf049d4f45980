"""Prefixes outlive the worker that computed them, through the public door, and no trouble on the way costs a token."""

import asyncio
import random
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as redis

from protos import inference_pb2 as api
from tests.cache.slow_proxy import SlowProxy
from tests.mesh.harness import Answer, Mesh, Process, Stub, ask, generate
from tests.ports import free_port
from tests.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

# One thread, invariant sums, small steps: prefill is slow enough that fetching pays also on a busy machine, and equal
# tokens are promised.
WORKER = {"WEFT_DETERMINISTIC": "true", "WEFT_THREADS": "1", "WEFT_STEP_TOKENS": "64", "WEFT_LOG_LEVEL": "debug"}
SENTENCE = "the king had a young daughter who went into dark woods to find her brother and an old white horse"
PATTERN = "weft:1:{block}:*"
TALES = 7
SETTLE_S = 30.0


def tale(number: int, words: int = 1100) -> str:
    """A text of more than 1,000 tokens, unlike that of another number."""
    source = random.Random(number)
    return " ".join(source.choices(SENTENCE.split(), k=words))


def request(number: int) -> api.GenerateRequest:
    """A sampled continuation of tale `number`, whose result is not kept."""
    message = ask(tale(number), max_tokens=12, temperature=0.9, seed=number, ignore_eos=True, logprobs=0)
    message.cache = api.CACHE_POLICY_READ_ONLY
    return message


@dataclass
class Stage:
    """A mesh whose first worker told all tales and died, its Redis, and the way between workers and cache service."""

    mesh: Mesh
    server: RedisServer
    client: Any
    proxy: SlowProxy
    stub: Stub
    metrics_port: int
    cold: list[Answer] = field(default_factory=list)
    """The answers of the worker that computed everything."""

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Process]:
        """A fresh process that knows how fast its link is; killed at the end."""
        process = self.mesh.new_worker(len(self.mesh.workers))
        self.mesh.workers.append(process)
        process.start()
        try:
            await process.ready()
            await measured(process)
            yield process
        finally:
            if process.popen is not None and process.popen.poll() is None:
                assert process.kill(signal.SIGKILL) == -signal.SIGKILL

    async def blocks(self) -> list[bytes]:
        """Names of the blocks of prefixes in Redis; what a worker measured its link with is larger."""
        names: list[bytes] = await self.client.keys(PATTERN)
        lengths = [await self.client.strlen(name) if not name.endswith(b"ledger") else 0 for name in names]
        return [name for name, length in zip(names, lengths, strict=True) if 0 < length < 256 << 10]

    async def corrupt_misses(self) -> int:
        """How many damaged blocks the cache service has counted."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        found = re.search(r'weft_cache_block_misses_total\{reason="corrupt"\} (\S+)', text)
        assert found, text
        return int(float(found[1]))


async def measured(worker: Process) -> None:
    """Waits until a worker knows how fast its link to the cache service is."""

    async def there() -> bool:
        return "link measured" in worker.log.read_text()

    await until(there)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what another process brings about."""
    async with asyncio.timeout(SETTLE_S):
        while not await true():  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Stage]:
    """All of it: the tales lie in Redis, no worker lives."""
    folder = tmp_path_factory.mktemp("prefixes")
    with RedisServer(folder / "redis", 512 << 20) as server:
        mesh = Mesh(folder, model, workers=0, redis_url=server.url)
        assert mesh.cache is not None
        metrics_port = free_port()
        mesh.cache.env["WEFT_METRICS_PORT"] = str(metrics_port)
        client = redis.Redis.from_url(server.url, protocol=2)
        async with SlowProxy(mesh.cache.port) as proxy:
            mesh.worker_env = {**WORKER, "WEFT_CACHE_ADDRESS": f"127.0.0.1:{proxy.port}"}
            mesh.workers = [mesh.new_worker(0)]
            async with mesh:
                await measured(mesh.workers[0])
                stage = Stage(mesh, server, client, proxy, mesh.stub(), metrics_port)
                stage.cold = [await generate(stage.stub, request(number)) for number in range(TALES)]
                wanted = sum(answer.receipt.prompt_tokens // 16 for answer in stage.cold)

                async def stored() -> bool:
                    return len(await stage.blocks()) >= wanted

                await until(stored)
                assert mesh.workers[0].kill(signal.SIGKILL) == -signal.SIGKILL
                yield stage
        await client.aclose()


def check(answer: Answer, expected: Answer) -> None:
    """Same tokens and log-probabilities bit for bit; every prompt token accounted for once."""
    receipt = answer.receipt
    assert answer.ids == expected.ids
    assert answer.logprobs == expected.logprobs
    assert receipt.prompt_tokens == receipt.prefill_tokens + receipt.cached_tokens + receipt.fetched_tokens


def is_warm(answer: Answer) -> bool:
    """Most of the prompt was fetched."""
    return answer.receipt.fetched_tokens >= 0.9 * answer.receipt.prompt_tokens


async def alone(on: Stage, wanted: api.GenerateRequest) -> Answer:
    """The answer that joined nobody's: an equal one's end may still be on its way to the scheduler."""
    while (answer := await generate(on.stub, wanted)).receipt.joined:
        pass
    return answer


async def test_a_restarted_worker_starts_warm(on: Stage) -> None:
    cold = on.cold[0]
    assert cold.receipt.prompt_tokens >= 1000
    assert cold.receipt.prefill_tokens == cold.receipt.prompt_tokens
    async with on.worker():
        warm = await generate(on.stub, request(0))
        check(warm, cold)
        assert warm.receipt.workers != cold.receipt.workers
        assert is_warm(warm)
        again = await alone(on, request(0))
        check(again, cold)
        assert again.receipt.fetched_tokens == 0, "it is in the device's memory now"
        assert again.receipt.cached_tokens == warm.receipt.fetched_tokens
        neither = request(1)
        neither.cache = api.CACHE_POLICY_BYPASS
        bypass = await generate(on.stub, neither)
        check(bypass, on.cold[1])
        assert bypass.receipt.prefill_tokens == bypass.receipt.prompt_tokens


async def test_a_prefix_of_another_living_worker_is_used(on: Stage) -> None:
    async with on.worker() as first:
        new = request(100)
        computed = await generate(on.stub, new)
        assert computed.receipt.fetched_tokens == 0
        count = len(on.cold) * (on.cold[0].receipt.prompt_tokens // 16)

        async def stored() -> bool:
            return len(await on.blocks()) > count + 32

        await until(stored)
        async with on.worker():
            started = asyncio.Event()
            long = ask("A long tale", max_tokens=600, ignore_eos=True)
            busy = asyncio.create_task(generate(on.stub, long, on_delta=lambda _: started.set()))
            await started.wait()
            assert first.popen is not None
            first.popen.terminate()  # It drains: new jobs go elsewhere.
            answer = await generate(on.stub, new)
            check(answer, computed)
            assert answer.receipt.workers != computed.receipt.workers
            assert answer.receipt.fetched_tokens > 0
            assert len((await busy).ids) == 600


async def test_over_a_slow_link_it_is_cheaper_to_compute(on: Stage) -> None:
    on.proxy.bytes_per_s = 1e6
    try:
        async with on.worker():
            before = on.proxy.answered_bytes
            answer = await generate(on.stub, request(1))
            check(answer, on.cold[1])
            assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens
            assert on.proxy.answered_bytes - before < 300_000, "nothing was fetched in vain"
    finally:
        on.proxy.bytes_per_s = 0.0
    async with on.worker():
        answer = await generate(on.stub, request(1))
        check(answer, on.cold[1])
        assert is_warm(answer), "over the fast link it is fetched"


async def test_a_link_that_becomes_slow_is_noticed(on: Stage) -> None:
    async with on.worker():
        on.proxy.bytes_per_s = 1e6
        try:
            for number in (2, 3, 4):
                answer = await generate(on.stub, request(number))
                check(answer, on.cold[number])
            assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens
        finally:
            on.proxy.bytes_per_s = 0.0


async def test_damaged_blocks_are_counted_misses(on: Stage) -> None:
    for name in await on.blocks():
        value = bytearray(await on.client.get(name))
        for place in random.Random(name).sample(range(len(value)), 3):
            value[place] ^= 0xFF
        await on.client.set(name, bytes(value))
    before = await on.corrupt_misses()
    async with on.worker():
        answer = await generate(on.stub, request(5))
        check(answer, on.cold[5])
        assert answer.receipt.fetched_tokens == 0
        assert await on.corrupt_misses() > before


async def test_without_redis_nothing_fails(on: Stage) -> None:
    async with on.worker():
        on.server.kill()
        answer = await generate(on.stub, request(6))
        check(answer, on.cold[6])
        assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens
        assert on.mesh.cache is not None
        on.mesh.cache.kill()
        assert len((await generate(on.stub, request(7))).ids) == 12
    on.server.start()
