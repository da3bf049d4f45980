"""Blocks out of another process's GPU memory: equal bit for bit, whatever that process sees, and when it is killed.

With two GPUs the other process has the second one; with one GPU both share it.
"""

import asyncio
import gc
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from grpc import aio

from bench.engine.pool_process import PoolProcess, held, make_pool
from bench.mesh import processes
from bench.mesh.disaggregated import LAST_WORKER, fetched, free_ports
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.sharing.pool import SharedGpuPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCKS = 300
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
OTHER = {"CUDA_VISIBLE_DEVICES": "1,0" if GPUS > 1 else "0"}
"""The other process's first GPU is this one's second one."""
SEED = int.from_bytes(os.urandom(4), "little")


@pytest.fixture(scope="module")
def other() -> Iterator[PoolProcess]:
    """A process with random blocks, different ones in each run."""
    with held(BLOCKS, SEED, OTHER) as process:
        yield process


@pytest.fixture(scope="module")
def pool() -> GpuPool:
    """A pool in which all bits are set."""
    return make_pool(BLOCKS)


def digests(contents: list[bytes]) -> list[str]:
    return [hashlib.sha256(each).hexdigest() for each in contents]


@pytest.mark.parametrize("count", [1, 7, 32, 125, 256])
def test_blocks_of_another_process_are_equal_bit_for_bit(other: PoolProcess, pool: GpuPool, count: int) -> None:
    source = random.Random(SEED + count)
    theirs, own = (source.sample(range(1, BLOCKS + 1), count) for _ in range(2))
    pool.scrub(own)
    mapped = SharedGpuPool(pool).map(other.ask("describe"))
    spared = sorted(set(range(BLOCKS + 1)) - set(own))[:8]
    before = pool.read(spared)
    pages = mapped.copy(theirs)
    assert len(pages) == count
    pool.write(own, pages)
    assert digests(pool.read(own)) == digests(other.ask("read", theirs))
    assert pool.read(spared) == before, "other blocks are as they were"
    mapped.close()
    with pytest.raises(CannotShare):
        mapped.copy([1])


def test_pages_are_free_again_when_they_were_written(other: PoolProcess, pool: GpuPool) -> None:
    mapped = SharedGpuPool(pool).map(other.ask("describe"))
    for round_ in range(12):
        theirs = random.Random(round_).sample(range(1, BLOCKS + 1), 100)
        pool.write(theirs, mapped.copy(theirs))
        assert digests(pool.read(theirs[:5])) == digests(other.ask("read", theirs[:5]))
    assert len(pool.staged_pages().free) == 256
    mapped.close()


def test_blocks_that_the_other_pool_does_not_have_are_refused(other: PoolProcess, pool: GpuPool) -> None:
    mapped = SharedGpuPool(pool).map(other.ask("describe"))
    for wrong in ([BLOCKS + 1], [-1], [1, 1 << 40]):
        with pytest.raises(CannotShare):
            mapped.copy(wrong)
    mapped.close()
    for damaged in (b"", b"{}", other.ask("describe")[:-5], other.ask("describe").replace(b'"blocks": 301', b'"x": 1')):
        with pytest.raises(CannotShare):
            SharedGpuPool(pool).map(damaged)


@pytest.mark.parametrize("visible", [("0", "1"), ("0,1", "1,0")] if GPUS > 1 else [("0", "0")])
def test_processes_that_see_one_gpu_or_both(visible: tuple[str, str]) -> None:
    """Whether a process that does not see the other's GPU can map its memory is the driver's choice: blocks are right,
    or the refusal has a name, and the process goes on."""
    with (
        held(64, SEED, {"CUDA_VISIBLE_DEVICES": visible[1]}) as lender,
        held(64, None, {"CUDA_VISIBLE_DEVICES": visible[0]}) as borrower,
    ):
        expected = digests(lender.ask("read", [3, 60, 4]))
        refusal = ""
        try:
            assert digests(borrower.ask("fetch", lender.ask("describe"), [3, 60, 4], [9, 1, 2])) == expected
        except CannotShare as error:
            refusal = str(error)
        print(f"visible {visible}: {refusal or 'mapped'}")
        assert not refusal or (len(visible[0]) == 1 and "visible" in refusal)
        assert len(borrower.ask("read", [5])) == 1, "the process goes on"


def test_memory_of_expandable_segments_is_refused_or_right(pool: GpuPool) -> None:
    with held(32, SEED, {**OTHER, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as process:
        try:
            described = process.ask("describe")
        except CannotShare as error:
            described, refusal = b"", str(error)
            print(refusal)
        if described:
            mapped = SharedGpuPool(pool).map(described)
            pool.write([1, 2], mapped.copy([7, 8]))
            assert digests(pool.read([1, 2])) == digests(process.ask("read", [7, 8]))
            mapped.close()
        else:
            assert "expandable_segments" in refusal


def test_a_process_that_is_killed_while_it_is_copied_from_leaves_this_one_whole(pool: GpuPool) -> None:
    """The copies are thrown away by the protocol. Here: no copy fails in a way that breaks this process's GPU, the
    memory of the dead one is free once it is unmapped, and nothing is left in shared memory."""
    files = set(os.listdir("/dev/shm"))
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device("cuda", 1 if GPUS > 1 else 0)
    free = torch.cuda.mem_get_info(device)[0]
    with held(1000, SEED, OTHER) as process:
        mapped = SharedGpuPool(pool).map(process.ask("describe"))
        copies, ended = 0, threading.Event()

        def copy() -> None:
            nonlocal copies
            with suppress(CannotShare):
                while not ended.is_set():
                    mapped.copy(list(range(1, 126)))
                    copies += 1

        thread = threading.Thread(target=copy)
        thread.start()
        while copies < 3:
            time.sleep(0.001)
        assert process.process.pid is not None
        os.kill(process.process.pid, signal.SIGKILL)
        process.process.join(20)
        after = copies
        deadline = time.monotonic() + 5
        while copies < after + 20 and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        print(f"copies after the death: {copies - after}, thread alive: {thread.is_alive()}")
        ended.set()
        thread.join(20)
        held_back = free - torch.cuda.mem_get_info(device)[0]
        mapped.close()
        print(f"bytes of the dead process before and after unmapping: {held_back}, "
              f"{free - torch.cuda.mem_get_info(device)[0]}")  # fmt: skip
    pool.scrub([1, 2])
    assert pool.read([1, 2]) == [bytes(pool.block_bytes)] * 2, "this process computes on"
    deadline = time.monotonic() + 10
    while (left := free - torch.cuda.mem_get_info(device)[0]) > 256 << 20 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left <= 256 << 20, f"{left} bytes of the dead process are not free"
    assert set(os.listdir("/dev/shm")) <= files


# ---- a mesh ----

SETTINGS = {
    "ENGINE": "gpu", "WEFT_DETERMINISTIC": "true", "WEFT_KV_BYTES": "3000000000", "WEFT_STEP_TOKENS": "1024",
    "MAX_BATCH_SIZE": "64", "MAX_SEQ_LENGTH": "4096", "WEFT_LOG_LEVEL": "info",
}  # fmt: skip
TOKENS = 24
MODEL = "random:llama-3.2-1b"
"""So large that fetching blocks is faster than computing them."""


def request(prompt: list[int], *, alone: bool = False) -> api.GenerateRequest:
    """A request. alone: for one worker, whose caches it does not use."""
    return api.GenerateRequest(
        prompt=api.Prompt(token_ids=api.TokenIds(ids=prompt)),
        sampling=api.Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        cache=api.CACHE_POLICY_BYPASS if alone else api.CACHE_POLICY_UNSPECIFIED,
    )


async def answer(
    stub: "stubs.InferenceAsyncStub", asked: api.GenerateRequest, begun: asyncio.Semaphore | None = None
) -> tuple[list[int], api.Receipt]:
    """-> tokens and receipt. begun: is released at the first token."""
    tokens: list[int] = []
    receipt = api.Receipt()
    async for response in stub.Generate(asked, timeout=120):
        if response.WhichOneof("event") == "delta":
            if begun is not None and not tokens:
                begun.release()
            tokens += response.delta.token_ids
        elif response.WhichOneof("event") == "receipt":
            receipt = response.receipt
    return tokens, receipt


def prompts(seed: int, count: int) -> list[list[int]]:
    source = random.Random(f"{SEED}/{seed}")
    return [[source.randrange(2, 6000) for _ in range(source.randrange(600, 1900))] for _ in range(count)]


def test_divided_answers_are_those_of_one_worker_and_a_killed_worker_costs_none() -> None:
    asyncio.run(_divided())


async def _divided() -> None:
    first_port = free_ports(2 + LAST_WORKER)
    settings, port = {**SETTINGS, "WEFT_METRICS_PORT": str(first_port)}, first_port + LAST_WORKER
    async with (
        processes.up(settings, model=MODEL, workers=2, roles=("prefill", "decode"), tls=True) as up,
        aio.insecure_channel(up.gateways[0]) as channel,
    ):
        stub: stubs.InferenceAsyncStub = stubs.InferenceStub(channel)
        async with asyncio.timeout(60):  # The first fetch maps the memory, and others do not wait for it.
            while not fetched(port).get("memory"):
                await answer(stub, request(prompts(time.monotonic_ns(), 1)[0]))
        first = prompts(1, 48)
        divided = await asyncio.gather(*(answer(stub, request(prompt)) for prompt in first))
        alone = await asyncio.gather(*(answer(stub, request(prompt, alone=True)) for prompt in first))
        assert [tokens for tokens, _ in divided] == [tokens for tokens, _ in alone]
        tokens, ways = sum(receipt.fetched_tokens for _, receipt in divided), fetched(port)
        print(f"prompt tokens {sum(map(len, first))}, fetched {tokens}, {ways}")
        assert ways.get("memory", 0) > 0.5 * sum(len(prompt) // 16 for prompt in first)
        assert "grpc" not in ways
        await _killed(up, stub)


async def _killed(up: processes.Up, stub: "stubs.InferenceAsyncStub") -> None:
    """The worker for prompts is killed while its blocks are copied."""
    asked, begun = prompts(2, 64), asyncio.Semaphore(0)
    running = [asyncio.create_task(answer(stub, request(prompt), begun)) for prompt in asked]
    for _ in range(6):
        await begun.acquire()
    os.kill(up.pid("worker-1"), signal.SIGKILL)
    divided = await asyncio.gather(*running)
    alone = await asyncio.gather(*(answer(stub, request(prompt, alone=True)) for prompt in asked))
    assert [tokens for tokens, _ in divided] == [tokens for tokens, _ in alone]
    assert all(len(tokens) == TOKENS for tokens, _ in divided)
    print(f"answers with a second attempt: {sum(receipt.attempts > 1 for _, receipt in divided)}")
