"""Prefixes outlive the worker that computed them, and no failure of link, cache or Redis changes or loses a token."""

import asyncio
import itertools
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

# One thread, deterministic mode, small steps: prefill is slow enough that fetching is faster on a busy machine too,
# and equal tokens are guaranteed.
WORKER = {"WEFT_DETERMINISTIC": "true", "WEFT_THREADS": "1", "WEFT_STEP_TOKENS": "64", "WEFT_LOG_LEVEL": "debug"}
SENTENCE = "the king had a young daughter who went into dark woods to find her brother and an old white horse"
PATTERN = "weft:1:{block}:*"
TALES = 4
_OWN_NUMBERS = itertools.count(100)
"""Of tales that no worker knows, nor one of a repetition of a test."""
SETTLE_S = 30.0
SLOW = 3e5
"""Bytes a second of a link over which a tale takes longer than its computation."""


def tale(number: int, words: int = 1100) -> str:
    """A text of more than 1,000 tokens, different for each number."""
    source = random.Random(number)
    return " ".join(source.choices(SENTENCE.split(), k=words))


def request(number: int) -> api.GenerateRequest:
    """A request for a sampled continuation of tale `number`; its result is not stored."""
    message = ask(tale(number), max_tokens=12, temperature=0.9, seed=number, ignore_eos=True, logprobs=0)
    message.cache = api.CACHE_POLICY_READ_ONLY
    return message


@dataclass
class Stage:
    """A mesh whose first worker answered all tales and was killed, its Redis, and the proxy of its cache service."""

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
        """A fresh worker that has measured its link to the cache service; killed at the end."""
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
        """Names of the blocks of prefixes in Redis, without the larger values that workers measure their link with."""
        names: list[bytes] = await self.client.keys(PATTERN)
        lengths = [await self.client.strlen(name) if not name.endswith(b"ledger") else 0 for name in names]
        return [name for name, length in zip(names, lengths, strict=True) if 0 < length < 256 << 10]

    async def corrupt_misses(self) -> int:
        """The number of damaged blocks that the cache service has counted."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        found = re.search(r'weft_cache_block_misses_total\{reason="corrupt"\} (\S+)', text)
        assert found, text
        return int(float(found[1]))


def measurements(worker: Process) -> int:
    """How often a worker has measured its links."""
    return worker.log.read_text().count("link measured")


async def measured(worker: Process, before: int = 0) -> None:
    """Waits until a worker has measured its link to the cache service, once more than before."""

    async def logged() -> bool:
        return measurements(worker) > before

    await until(logged)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Waits until a condition in another process is true."""
    async with asyncio.timeout(SETTLE_S):
        while not await true():  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Stage]:
    """The mesh after the first worker: all tales are in Redis, and no worker runs."""
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
    """Asserts equal tokens, bit-identical log-probabilities, and that each prompt token is counted once."""
    receipt = answer.receipt
    assert answer.ids == expected.ids
    assert answer.logprobs == expected.logprobs
    assert receipt.prompt_tokens == receipt.prefill_tokens + receipt.cached_tokens + receipt.fetched_tokens


def is_warm(answer: Answer) -> bool:
    """Whether most of the prompt was fetched."""
    return answer.receipt.fetched_tokens >= 0.9 * answer.receipt.prompt_tokens


async def alone(stage: Stage, wanted: api.GenerateRequest) -> Answer:
    """Asks until the answer joined no job: the end of an equal job may not have reached the scheduler yet."""
    while (answer := await generate(stage.stub, wanted)).receipt.joined:
        pass
    return answer


async def test_a_restarted_worker_starts_warm(stage: Stage) -> None:
    cold = stage.cold[0]
    assert cold.receipt.prompt_tokens >= 1000
    assert cold.receipt.prefill_tokens == cold.receipt.prompt_tokens
    async with stage.worker():
        warm = await generate(stage.stub, request(0))
        check(warm, cold)
        assert warm.receipt.workers != cold.receipt.workers
        assert is_warm(warm)
        again = await alone(stage, request(0))
        check(again, cold)
        assert again.receipt.fetched_tokens == 0, "the prefix is in device memory now"
        # What was fetched, and what was computed because a fetch was late.
        assert again.receipt.cached_tokens == (again.receipt.prompt_tokens - 1) // 16 * 16
        neither = request(1)
        neither.cache = api.CACHE_POLICY_BYPASS
        bypass = await generate(stage.stub, neither)
        check(bypass, stage.cold[1])
        assert bypass.receipt.prefill_tokens == bypass.receipt.prompt_tokens


async def test_a_prefix_of_another_living_worker_is_used(stage: Stage) -> None:
    before = len(await stage.blocks())
    new = [request(next(_OWN_NUMBERS)) for _ in range(3)]
    async with stage.worker() as first:
        computed = [await generate(stage.stub, each) for each in new]
        assert [each.receipt.fetched_tokens for each in computed] == [0, 0, 0]
        wanted = before + sum(each.receipt.prompt_tokens // 16 for each in computed)

        async def stored() -> bool:
            return len(await stage.blocks()) >= wanted

        await until(stored)
        async with stage.worker() as second:
            started = asyncio.Event()
            long = ask("A long tale", max_tokens=600, ignore_eos=True)
            busy = asyncio.create_task(generate(stage.stub, long, on_delta=lambda _: started.set()))
            await started.wait()
            assert first.popen is not None
            first.popen.terminate()  # The worker drains: new jobs go to the other one.
            for each, expected in zip(new, computed, strict=True):
                seen = measurements(second)
                answer = await generate(stage.stub, each)
                check(answer, expected)
                assert answer.receipt.workers[-1] != expected.receipt.workers[-1]
                if answer.receipt.fetched_tokens:
                    break
                await measured(second, seen)  # The machine was busy when it measured its link.
            assert answer.receipt.fetched_tokens > 0
            assert len((await busy).ids) == 600


async def test_over_a_slow_link_the_prompt_is_computed(stage: Stage) -> None:
    stage.proxy.bytes_per_s = SLOW
    try:
        async with stage.worker():
            before = stage.proxy.answered_bytes
            answer = await generate(stage.stub, request(1))
            check(answer, stage.cold[1])
            assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens
            assert stage.proxy.answered_bytes - before < 100_000, "no block was fetched and dropped"
    finally:
        stage.proxy.bytes_per_s = 0.0
    async with stage.worker():
        answer = await generate(stage.stub, request(1))
        check(answer, stage.cold[1])
        assert is_warm(answer), "over the fast link the prefix is fetched"


async def test_a_link_that_becomes_slow_is_noticed(stage: Stage) -> None:
    async with stage.worker():
        stage.proxy.bytes_per_s = SLOW
        try:
            for number in (0, 2, 3):
                answer = await generate(stage.stub, request(number))
                check(answer, stage.cold[number])
            assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens
        finally:
            stage.proxy.bytes_per_s = 0.0


async def test_damaged_blocks_are_counted_misses(stage: Stage) -> None:
    for name in await stage.blocks():
        value = bytearray(await stage.client.get(name))
        for place in random.Random(name).sample(range(len(value)), 3):
            value[place] ^= 0xFF
        await stage.client.set(name, bytes(value))
    before = await stage.corrupt_misses()
    async with stage.worker():
        answer = await generate(stage.stub, request(3))
        check(answer, stage.cold[3])
        assert answer.receipt.fetched_tokens == 0
        assert await stage.corrupt_misses() > before


async def test_without_redis_nothing_fails(stage: Stage) -> None:
    async with stage.worker():
        stage.server.kill()
        answer = await generate(stage.stub, request(2))
        check(answer, stage.cold[2])
        assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens
        assert stage.mesh.cache is not None
        stage.mesh.cache.kill()
        assert len((await generate(stage.stub, request(7))).ids) == 12
    stage.server.start()
