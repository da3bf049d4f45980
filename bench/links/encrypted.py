"""What mutual TLS between services costs: two meshes, plain and encrypted, measured in turns."""

import time
from typing import Any

from grpc import aio

from bench.mesh.processes import Up, paced, processor_s, up
from bench.table import Figure
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from weft.load.distribution import Distribution
from weft.load.plan import Plan
from weft.load.run import run

TURNS = 6
REQUESTS = 100
_STEP_MS = 4.0


async def encrypted() -> list[Figure]:
    """Time to the first token of single requests, and tokens per second of 64, with TLS and without."""
    firsts = {False: Distribution(), True: Distribution()}
    rates: dict[bool, list[float]] = {False: [], True: []}
    used: dict[bool, list[float]] = {False: [], True: []}
    async with up(paced(_STEP_MS)) as plain, up(paced(_STEP_MS), tls=True) as secured:
        for turn in range(TURNS):
            for tls in (False, True) if turn % 2 else (True, False):
                mesh = secured if tls else plain
                await _first_tokens(mesh, firsts[tls], turn)
                rate, seconds = await _throughput(mesh)
                rates[tls].append(rate)
                used[tls].append(seconds)
    first = {tls: firsts[tls].percentile(50) for tls in firsts}
    rate_of, used_of = ({tls: sum(each[tls]) / TURNS for tls in each} for each in (rates, used))
    note = f"{TURNS} turns; {rate_of[False]:,.0f} tokens/s without TLS"
    return [
        Figure("first token, plain, p50", first[False], "ms"),
        Figure("first token, more with TLS between services, p50", first[True] - first[False], "ms", "<= 0.5"),
        Figure("throughput lost with TLS, 64 streams", 100 * (1 - rate_of[True] / rate_of[False]), "%", "<= 2", note),
        Figure("gateway's and worker's processor time, more with TLS", 100 * (used_of[True] / used_of[False] - 1), "%"),
    ]


async def _first_tokens(mesh: Up, firsts: Distribution, turn: int) -> None:
    async with aio.insecure_channel(mesh.gateways[0]) as channel:
        stub: Any = stubs.InferenceStub(channel)
        for number in range(REQUESTS):
            prompt = api.Prompt(token_ids=api.TokenIds(ids=[5 + turn, 7 + number, 9]))
            sampling = api.Sampling(max_tokens=2, ignore_eos=True)
            request = api.GenerateRequest(prompt=prompt, sampling=sampling, cache=api.CACHE_POLICY_BYPASS)
            began = time.monotonic()
            async for response in stub.Generate(request):
                if response.delta.token_ids:
                    firsts.add((time.monotonic() - began) * 1e3)
                    break


async def _throughput(mesh: Up) -> tuple[float, float]:
    """Tokens per second, and processor seconds of gateway and worker for each 1,000 tokens."""
    pids = mesh.pid("gateway"), mesh.pid("worker-1")
    before = sum(map(processor_s, pids))
    plan = Plan(
        mesh.gateways[0], requests=128, concurrency=64, input_tokens=16, output_tokens=300, warmup=0, cache="bypass"
    )  # fmt: skip
    tally = (await run(plan)).tally
    seconds = sum(map(processor_s, pids)) - before
    return tally.output_tokens / tally.last_ended, seconds / tally.output_tokens * 1e3
