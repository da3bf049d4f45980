"""Cost of tracing: the same load with no tracing, 1%, all requests, and all requests to an unresponsive collector.

    python -m bench.mesh.tracing [model host] [--json FILE]

The meshes run side by side and take turns, so that what else the machine does meets all of them; each figure is the
median over the rounds of a mesh's ratio to the one without tracing (with a dead collector: to the one with a live one).
Wall-clock time shares the cores with the client; processor time is that of the mesh's own processes.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from bench import table
from bench.mesh.processes import Up, paced, processor_s, up
from bench.table import Figure
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs

ROUNDS = 8
STREAMS = 16
_PROCESSES = ("gateway", "scheduler", "worker-1", "cache")
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one round."""

    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Side:
    """One tracing configuration and its rounds."""

    name: str
    mesh: Up
    tokens_per_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def collector(answers: bool) -> AsyncIterator[str]:
    """Endpoint of a collector that accepts everything, and either answers or never does."""

    async def export(request: bytes, context: Any) -> bytes:
        if not answers:
            await asyncio.sleep(3600)
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler(export)
    server = aio.server()
    service, _, method = _EXPORT.removeprefix("/").partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def compare(settings: Mapping[str, str], load: Load) -> list[Side]:
    """Run the rounds of all configurations in turn."""
    async with contextlib.AsyncExitStack() as stack:
        alive = await stack.enter_async_context(collector(answers=True))
        dead = await stack.enter_async_context(collector(answers=False))
        some = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
        ways: dict[str, dict[str, str]] = {
            "off": {},
            "no tracing again (what the machine's noise makes of it)": {},
            "1%": {"OTEL_EXPORTER_OTLP_ENDPOINT": alive, **some},
            "100%": {"OTEL_EXPORTER_OTLP_ENDPOINT": alive},
            "100%, dead collector": {"OTEL_EXPORTER_OTLP_ENDPOINT": dead},
        }
        sides = [Side(name, await stack.enter_async_context(up({**settings, **way}))) for name, way in ways.items()]
        for side in sides:
            await _round(side, load)
            side.tokens_per_s.clear()
            side.processor_s.clear()
        for number in range(ROUNDS):
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                await _round(side, load)
    return sides


async def _round(side: Side, load: Load) -> None:
    pids = [side.mesh.pid(name) for name in _PROCESSES]
    async with aio.insecure_channel(side.mesh.gateways[0]) as channel:
        stub: Any = stubs.InferenceStub(channel)
        numbers = iter(range(load.requests))

        async def client() -> None:
            for number in numbers:
                async for _ in stub.Generate(_request(number, load)):
                    pass

        used, began = sum(map(processor_s, pids)), time.monotonic()
        await asyncio.gather(*(client() for _ in range(STREAMS)))
        seconds, used = time.monotonic() - began, sum(map(processor_s, pids)) - used
    side.tokens_per_s.append(load.requests * load.output_tokens / seconds)
    side.processor_s.append(used)


def _request(number: int, load: Load) -> api.GenerateRequest:
    ids = random.Random(number).choices(range(1, 6000), k=load.prompt_tokens)
    sampling = api.Sampling(max_tokens=load.output_tokens, ignore_eos=True)
    prompt = api.Prompt(token_ids=api.TokenIds(ids=ids))
    return api.GenerateRequest(prompt=prompt, sampling=sampling, cache=api.CACHE_POLICY_BYPASS)


def _figures(sides: list[Side], load: Load, goals: Mapping[str, str]) -> list[Figure]:
    off, again, some, everything, dead = sides
    plain_ms = statistics.median(off.processor_s) / load.requests * 1e3
    figures = [
        Figure("no tracing", statistics.median(off.tokens_per_s), "tokens/s"),
        Figure("no tracing: processor time per request", plain_ms, "ms"),
    ]
    for side, other in ((again, off), (some, off), (everything, off), (dead, everything)):
        lost = _median_ratio(side.tokens_per_s, other.tokens_per_s)
        more = _median_ratio(side.processor_s, other.processor_s)
        figures.append(Figure(f"{side.name}: throughput lost", (1 - lost) * 100, "%", goals.get(side.name, "")))
        figures.append(Figure(f"{side.name}: added processor time", (more - 1) * 100, "%"))
    return figures


def _median_ratio(mine: list[float], plain: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(mine, plain, strict=True))


async def model() -> list[Figure]:
    """The demo model on the CPU engine: 64 tokens in, 64 out, 16 streams."""
    load = Load(requests=48, prompt_tokens=64, output_tokens=64)
    return _figures(await compare({}, load), load, {"1%": "<= 1", "100%": "<= 4", "100%, dead collector": "<= 1"})


async def host() -> list[Figure]:
    """No model, a step every 5 ms: only the mesh's own work, so that the share of spans is largest."""
    load = Load(requests=96, prompt_tokens=64, output_tokens=64)
    return _figures(await compare(paced(5.0), load), load, {})


PARTS: dict[str, table.Part] = {
    "model": ("Tracing, with the demo model", model),
    "host": ("Tracing, without a model", host),
}


if __name__ == "__main__":
    asyncio.run(table.measure("Measures what tracing costs.", PARTS))
