"""Measures links, gateway, admission and planning, without a model. `make bench-links`.

    python -m bench.links.measure [link stopped gateway events added added-events admission planning prefix tls]
        [--json FILE]

The worker is a real process with the paced engine. Wall-clock figures share the machine's cores with the client's
load; figures per core divide by the processor time of the one process that they are about.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from grpc import aio

from bench import table
from bench.links import admission, sse
from bench.links.encrypted import encrypted
from bench.links.run_link import readers
from bench.mesh.processes import meanwhile, paced, processor_s, up
from bench.table import Figure
from protos import cache_pb2 as cache
from protos import cache_pb2_grpc as cache_stubs
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services import rpc
from services.worker.job import Job, SamplingParams
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Planner
from services.worker.planner.sequence import Sequence
from weft.load.distribution import Distribution
from weft.load.plan import Plan
from weft.load.run import run

ROUNDS = 3
WINDOW_S = 3.0


# ---- the Run link ----


async def link() -> list[Figure]:
    """Throughput of the Run link from one worker to its gateways, with steps that take no time."""
    figures = []
    async with up(paced(0.0)) as mesh:
        pid = mesh.pid("worker-1")
        for gateways in (1, 4):
            for rows in (1, 8, 64):
                shares = [rows // gateways + (number < rows % gateways) for number in range(gateways)]
                async with readers(mesh.worker, [share for share in shares if share]) as links:
                    best = (0.0, 0.0, 0.0)
                    for _ in range(ROUNDS):
                        for each in links:
                            each.begin()
                        began, used = time.monotonic(), processor_s(pid)
                        await asyncio.sleep(WINDOW_S)
                        seconds, used = time.monotonic() - began, processor_s(pid) - used
                        tokens = sum(each.tokens for each in links)
                        messages = sum(each.messages for each in links)
                        best = max(best, (tokens / seconds, messages / seconds, tokens / used))
                name = f"worker-to-gateway link, {rows} sequences per step, {gateways} gateway{'s' * (gateways > 1)}"
                note = f"{best[1]:,.0f} messages/s; {best[2]:,.0f} tokens per second of the worker's processor"
                figures.append(Figure(name, best[0], "tokens/s", ">= 100000" if rows == 64 else "", note))
    return figures


# ---- a stopped reader ----


async def stopped() -> list[Figure]:
    """Slowdown of other readers when one gateway, or one client, stops reading."""
    return [await _stopped_gateway(), *await _stopped_clients()]


async def _stopped_gateway() -> Figure:
    """Two gateways share a worker with steps of 5 ms; one stops reading."""
    normal, beside = [], []
    async with up(paced(5.0)) as mesh:
        for _ in range(ROUNDS):
            async with readers(mesh.worker, [32, 32]) as (one, other):
                normal.append(await _gap(one))
                other.stop_reading()
                beside.append(await _gap(one))
    return _delay("a gateway stopped reading: others' time per token", normal, beside)


class _Counting(Protocol):
    gaps: Distribution

    def begin(self) -> None:
        """Reset the counters."""


async def _gap(counting: _Counting) -> tuple[float, float]:
    """Mean and p99 of the gaps in one window."""
    counting.begin()
    await asyncio.sleep(WINDOW_S)
    return counting.gaps.mean, counting.gaps.percentile(99)


def _delay(name: str, normal: list[tuple[float, float]], beside: list[tuple[float, float]]) -> Figure:
    """Compare the best rounds, to reduce the effect of other work on the machine."""
    (mean, _), (mean_beside, _) = min(normal), min(beside)
    p99, p99_beside = (min(round_[1] for round_ in rounds) for rounds in (normal, beside))
    note = f"mean {mean:.3f} ms, then {mean_beside:.3f}; p99 {p99:.2f} ms, then {p99_beside:.2f}"
    return Figure(name, (mean_beside / mean - 1) * 100, "% more", "<= 5", note)


async def _stopped_clients() -> list[Figure]:
    """32 streams through a gateway with steps of 10 ms, beside 8 others: first while these read, then while they do
    not."""
    figures = []
    async with up(paced(10.0)) as mesh:
        for name, others in (("that never reads", _not_reading), ("that is stopped (SIGSTOP)", _frozen)):
            normal, beside = [], []
            for _ in range(ROUNDS):
                async with _streams(mesh.gateways[0], 32) as counting, others(mesh.gateways[0], 8) as stop:
                    normal.append(await _gap(counting))
                    stop()
                    beside.append(await _gap(counting))
            figures.append(_delay(f"a client {name}: others' time per token", normal, beside))
    return figures


class _Gaps:
    """Milliseconds between the tokens of streams."""

    def __init__(self) -> None:
        self.gaps = Distribution()

    def begin(self) -> None:
        """Reset the counters."""
        self.gaps = Distribution()


@contextlib.asynccontextmanager
async def _streams(address: str, count: int) -> AsyncIterator[_Gaps]:
    """Streams whose client reads without pauses."""
    counting = _Gaps()

    async def follow(number: int, stub: Any) -> None:
        last = 0.0
        async for _ in stub.Generate(_request(number, 16, 100_000)):
            now = time.monotonic()
            if last:
                counting.gaps.add((now - last) * 1e3)
            last = now

    async with aio.insecure_channel(address) as channel:
        stub = stubs.InferenceStub(channel)
        async with meanwhile(*(follow(number, stub) for number in range(count))):
            await asyncio.sleep(1.0)
            yield counting


@contextlib.asynccontextmanager
async def _not_reading(address: str, count: int) -> AsyncIterator[Callable[[], None]]:
    """Calls that are no longer read, while their process keeps running."""
    reads = True

    async def follow(call: Any) -> None:
        async for _ in call:
            while not reads:  # noqa: ASYNC110 - nothing ends this but cancellation
                await asyncio.sleep(1.0)

    def stop() -> None:
        nonlocal reads
        reads = False

    # A connection of its own, as another client has.
    async with aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = stubs.InferenceStub(channel)
        calls = [stub.Generate(_request(1000 + number, 16, 100_000)) for number in range(count)]
        async with meanwhile(*map(follow, calls)):
            yield stop


@contextlib.asynccontextmanager
async def _frozen(address: str, count: int) -> AsyncIterator[Callable[[], None]]:
    """A client process that is stopped by a signal."""
    command = "import asyncio, sys; from bench.links import measure; "
    command += "asyncio.run(measure.read_on(sys.argv[1], int(sys.argv[2])))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", command, address, str(count))
    await asyncio.sleep(2.0)
    try:
        yield lambda: process.send_signal(signal.SIGSTOP)
    finally:
        process.kill()
        await process.wait()


async def read_on(address: str, count: int) -> None:
    """A client that reads streams until it is killed."""
    async with _streams(address, count):
        await asyncio.Event().wait()


def _request(number: int, tokens: int, max_tokens: int) -> api.GenerateRequest:
    prompt = api.Prompt(token_ids=api.TokenIds(ids=random.Random(number).choices(range(1, 6000), k=tokens)))
    sampling = api.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return api.GenerateRequest(prompt=prompt, sampling=sampling, cache=api.CACHE_POLICY_BYPASS)


# ---- the gateway ----


async def gateway() -> list[Figure]:
    """Messages and tokens per second to standard gRPC clients: one token per message, then batched tokens."""
    figures = []
    for name, step_ms, what, goal in (
        ("one token a message", 4.0, "messages", ">= 20000"),
        ("engine as fast as it goes", 0.0, "tokens", ">= 200000"),
    ):
        async with up(paced(step_ms)) as mesh:
            pid = mesh.pid("gateway")
            plan = Plan(mesh.gateways[0], requests=128, concurrency=64, input_tokens=16, output_tokens=1500, warmup=0)
            used = processor_s(pid)
            tally = (await run(plan)).tally
            used = processor_s(pid) - used
        count = tally.messages if what == "messages" else tally.output_tokens
        per_second = f"{tally.messages / tally.last_ended:,.0f} messages/s, "
        per_second += f"{tally.output_tokens / tally.last_ended:,.0f} tokens/s on the wall"
        figures.append(Figure(f"gateway, {name}, per core", count / used, f"{what}/s", goal, per_second))
    return figures


async def events() -> list[Figure]:
    """The same over HTTP: server-sent events of OpenAI's API."""
    one_token = await _events("one token an event", 4.0, "events", ">= 20000")
    return [one_token, await _events("engine as fast as it goes", 0.0, "tokens", "")]


async def _events(name: str, step_ms: float, what: str, goal: str) -> Figure:
    chunks, limit, requests, tokens = 0, asyncio.Semaphore(64), 128, 1500

    def on_chunk(count: int, _: float) -> None:
        nonlocal chunks
        chunks += count

    async def one(number: int, address: str) -> None:
        async with limit:
            await sse.stream(address, _completion(number, 16, tokens), on_chunk)

    async with up(paced(step_ms)) as mesh:
        pid = mesh.pid("gateway")
        used, began = processor_s(pid), time.monotonic()
        await asyncio.gather(*(one(number, mesh.http) for number in range(requests)))
        used, seconds = processor_s(pid) - used, time.monotonic() - began
    count = chunks if what == "events" else requests * tokens  # No answer ends early.
    note = f"{chunks / seconds:,.0f} events/s, {requests * tokens / seconds:,.0f} tokens/s on the wall"
    return Figure(f"gateway, {name}, per core", count / used, f"{what}/s", goal, note)


def _completion(number: int, tokens: int, max_tokens: int) -> dict[str, Any]:
    """The request of `_request` as OpenAI's API writes it."""
    prompt = list(_request(number, tokens, max_tokens).prompt.token_ids.ids)
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "cache": "bypass"}


# ---- what the mesh adds ----


async def added_to_events() -> list[Figure]:
    """As `added`, for each token of a stream over HTTP."""
    step_s, batch, tokens, requests = 0.02, 64, 64, 300
    rate = 0.7 * batch / (tokens * step_s)
    ages = Distribution()

    def on_chunk(count: int, now: float) -> None:
        for _ in range(count):
            ages.add(now % step_s * 1e3)

    async with up(paced(step_s * 1e3, batch=batch)) as mesh:
        chance, due = random.Random(7), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(requests):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(sse.stream(mesh.http, _completion(number, 128, tokens), on_chunk))
                due += chance.expovariate(rate)
    return [
        Figure("latency added to an event, p50", ages.percentile(50), "ms", "<= 0.6", f"{rate:.0f} requests/s"),
        Figure("latency added to an event, p99", ages.percentile(99), "ms", "<= 2.5"),
    ]


async def added() -> list[Figure]:
    """Latency that the mesh adds to the first token and to each token, at 70% of the worker's slots."""
    step_s, batch, tokens, requests = 0.02, 64, 64, 600
    rate = 0.7 * batch / (tokens * step_s)
    firsts, ages = Distribution(), Distribution()

    async def one(number: int, stub: Any) -> None:
        request = _request(number, 128, tokens)
        began, first, receipt = time.monotonic(), 0.0, api.Receipt()
        async for response in stub.Generate(request):
            now = time.monotonic()
            if response.delta.token_ids:
                first = first or now
                # Steps end at multiples of the step time on this clock.
                ages.add(now % step_s * 1e3)
            receipt = response.receipt if response.HasField("receipt") else receipt
        firsts.add(max(0.0, first - began - receipt.timings.prefill_s - receipt.timings.queue_s) * 1e3)

    async with up(paced(step_s * 1e3, batch=batch)) as mesh, aio.insecure_channel(mesh.gateways[0]) as channel:
        stub: Any = stubs.InferenceStub(channel)
        await asyncio.gather(*(one(-number, stub) for number in range(1, 9)))
        firsts, ages = Distribution(), Distribution()
        chance, due = random.Random(7), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(requests):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(one(number, stub))
                due += chance.expovariate(rate)
    note = f"{rate:.0f} requests/s, 128 tokens in, {tokens} out, step {step_s * 1e3:.0f} ms"
    return [
        Figure("latency added to the first token, p50", firsts.percentile(50), "ms", "<= 1.5", note),
        Figure("latency added to the first token, p99", firsts.percentile(99), "ms", "<= 5"),
        Figure(
            "latency added to a token, p50",
            ages.percentile(50),
            "ms",
            "<= 0.6",
            "from the end of the step to the client",
        ),
        Figure("latency added to a token, p99", ages.percentile(99), "ms", "<= 2.5"),
    ]


# ---- scheduler and planner ----


async def admit() -> list[Figure]:
    """Jobs per second that one scheduler process admits, with prompts of 2,000 tokens and their block keys."""
    figures = await admission.run(jobs=10_000, window=64, blocks=125)
    note = f"p50 {figures.p50_ms:.2f} ms, p99 {figures.p99_ms:.2f} ms; {figures.per_core:,.0f} per core"
    return [Figure("admission over gRPC, 64 at a time", figures.per_second, "requests/s", ">= 4000", note)]


async def planning() -> list[Figure]:
    """Processor time of planning a step in which every sequence decodes."""
    figures = []
    for count, limit in ((256, 150), (1024, 500)):
        batch = Planner(BlockPool(count * 40), 16, count, 4 * count, True)
        for number in range(count):
            batch.add(_sequence(_job(number, 256)))
        plan = _decode(batch)
        best = min(_timed(plan, 20) for _ in range(10))
        figures.append(Figure(f"planning a step of {count} sequences", best * 1e6, "us", f"<= {limit}"))
    return figures


def _decode(batch: Planner) -> Callable[[], object]:
    """Prefill all sequences -> a function that plans the next decode step."""
    while any(sequence.remaining > 1 for sequence in batch.running) or batch.waiting:
        _land(batch)
    return batch.plan


def _land(batch: Planner) -> None:
    for row in batch.plan().rows:
        batch.commit(row, [1] if row.samples else [])


async def prefix() -> list[Figure]:
    """Processor time of a prefix look-up of 2,000 tokens in the worker's own cache: computing keys and finding
    blocks."""
    pool = BlockPool(4096)
    job = _job(1, 2000)
    known = _sequence(job)
    blocks = pool.take(125)
    for block, key in zip(blocks, known.keys.first(125), strict=True):
        pool.publish(block, key)

    def look_up() -> None:
        assert pool.match(_sequence(job).keys.first(125)) == blocks

    best = min(_timed(look_up, 20) for _ in range(20))
    note = "125 blocks of 16, all found"
    return [
        Figure("prefix look-up of 2,000 tokens, local", best * 1e6, "us", "<= 150", note),
        Figure("the same in Redis, through the cache service", await _shared_look_up() * 1e6, "us", "<= 900", "p50"),
    ]


async def _shared_look_up() -> float:
    """Median seconds of a HasBlocks request for 125 blocks that Redis holds."""
    keys = [random.Random(number).randbytes(32) for number in range(125)]
    blocks = cache.BlockList(keys=b"".join(keys), layout=b"bench")
    async with up(paced(1.0)) as mesh, rpc.link_channel(mesh.cache, "cache") as channel:
        stub: Any = cache_stubs.CacheStub(channel)
        call = stub.PutBlocks()
        await call.write(cache.PutBlocksRequest(blocks=blocks))
        for index in (await call.read()).wanted:
            piece = cache.BlockPiece(index=index, data=os.urandom(1024), last=True)
            await call.write(cache.PutBlocksRequest(pieces=[piece]))
        await call.done_writing()
        assert len((await call.read()).stored) == len(keys), "Redis took them all"
        taken = []
        for _ in range(300):
            began = time.monotonic()
            assert (await stub.HasBlocks(cache.HasBlocksRequest(blocks=blocks))).stored == len(keys)
            taken.append(time.monotonic() - began)
    return sorted(taken)[len(taken) // 2]


def _job(number: int, tokens: int) -> Job:
    prompt = random.Random(number).choices(range(6000), k=tokens)
    return Job(number, prompt, tokens, SamplingParams(max_tokens=4096))


def _sequence(job: Job) -> Sequence:
    return Sequence(job, job.key, 16, 128 * 1024, b"bench")


def _timed(work: Callable[[], object], times: int) -> float:
    """Mean processor seconds of one call."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times


PARTS: dict[str, table.Part] = {
    "link": ("Worker-to-gateway link", link),
    "stopped": ("A gateway or client that stops reading", stopped),
    "gateway": ("Gateway-to-client throughput", gateway),
    "added": ("Latency that the mesh adds at 70% load", added),
    "events": ("Gateway-to-client throughput over HTTP", events),
    "added-events": ("Latency that the mesh adds at 70% load, over HTTP", added_to_events),
    "admission": ("Admission by the scheduler", admit),
    "planning": ("Planning of steps", planning),
    "prefix": ("Prefix look-up", prefix),
    "tls": ("Mutual TLS between services, on and off in turns", encrypted),
}


if __name__ == "__main__":
    asyncio.run(table.measure("Measures what surrounds the model.", PARTS))
