"""One worker for prompts and one for answers beside two workers for both: times between tokens, goodput, handoffs.

    python -m bench.mesh.disaggregated [--arrangements replicas divided short grpc] [--model random:llama-3.1-8b]
                                       [--inputs 2000] [--outputs 200] [--shares 0.5 0.7] [--capacity 20] [--seconds 25]
                                       [--peak 96] [--limit 440] [--idle]

Each arrangement is a mesh of two workers, one on each GPU, whose links are protected as `weft serve` protects them:

    replicas   both compute prompts and answers
    divided    one computes prompts, the other answers; blocks are copied from GPU to GPU
    short      the same with steps of at most 2,048 tokens
    grpc       "divided" with WEFT_DEVICE_FETCH=false: blocks go through host memory and over gRPC
    whole      "divided", and no layers of a block are copied before it is whole
    grpc-all   "grpc", and all blocks are fetched, though computing them were faster
    grpc-whole "grpc-all", and no layers of a block are sent before it is whole

With one GPU both workers share it: --settings '{"WEFT_KV_BYTES": "20000000000"}' lets them. With --idle there are no
loads. For prompts in one step --settings has "WEFT_STEP_TOKENS" for all their tokens.

Rows of each: one request at a time (idle), as many at once as --peak (its own capacity, requests a second), and a
Poisson process at each share of the capacity of the replicas (or of --capacity, if the replicas are not measured), and
of its own. An answer is good if its first token came within 300 ms, and the mean (tpot) and 99 of 100 (itl) of the
times between its tokens are at most 15 ms. Goodput is in good answers a second; "within" has the shares of answers
within each bound alone. "seam" is the time from the first token to the second. One line of JSON for each row as soon as
it is done; the first failure ends the program.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from grpc import aio

from bench.mesh import processes
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from report import machine
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run

GOOD = {"ttft": 300.0, "tpot": 15.0, "itl": 15.0}
"""Milliseconds."""
DIVIDED = ("prefill", "decode")
ARRANGEMENTS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "replicas": ((), {}),
    "divided": (DIVIDED, {}),
    "short": (DIVIDED, {"WEFT_STEP_TOKENS": "2048"}),
    "grpc": (DIVIDED, {"WEFT_DEVICE_FETCH": "false"}),
    "whole": (DIVIDED, {"HANDOFFS": "whole"}),
    "grpc-all": (DIVIDED, {"WEFT_DEVICE_FETCH": "false", "HANDOFFS": "patient"}),
    "grpc-whole": (DIVIDED, {"WEFT_DEVICE_FETCH": "false", "HANDOFFS": "patient whole"}),
}
"""Roles of the workers, and settings. With HANDOFFS workers run `bench.mesh.servers.handoffs`."""
IDLE_REQUESTS, WARM_REQUESTS = 6, 4
LAST_WORKER = 4
"""Ports from the first one for metrics to that of the second worker."""


@dataclass(slots=True)
class Bench:
    """The arguments, and what is known so far."""

    arguments: argparse.Namespace
    began: float = field(default_factory=time.monotonic)
    capacity: float = 0.0
    """Of the replicas, in requests a second."""
    seed: int = field(default_factory=lambda: time.time_ns() % (1 << 31))

    def say(self, row: str, **figures: Any) -> None:
        """Prints a row. Ends the program if requests failed."""
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
        print(json.dumps({"row": row, "at_s": round(time.monotonic() - self.began), **rounded}), flush=True)
        if figures.get("failed"):
            raise SystemExit(f"{row}: {figures['failed']} requests failed: {figures.get('errors')}")

    def plan(self, address: str, **changes: Any) -> Plan:
        """A load of unequal prompts."""
        self.seed += 1
        lengths = {"input_tokens": self.arguments.inputs, "output_tokens": self.arguments.outputs}
        return Plan(address, processes=8, warmup=0, goodput=GOOD, seed=self.seed, deadline_s=60.0, **lengths, **changes)

    async def load(self, row: str, plan: Plan, metrics_port: int, **facts: Any) -> dict[str, float]:
        """Runs a load and prints its row. -> its figures."""
        before = fetched(metrics_port)
        done = await run(plan)
        found = metrics.figures(done.tally, goodput=True)
        hops = metrics.receipts(done.tally)["hops"]
        now = fetched(metrics_port)
        self.say(
            row, **facts, requests=int(found["completed"]), failed=int(found["failed"]), errors=dict(done.tally.errors),
            per_s=found["request_throughput"], goodput=found["request_goodput"],
            good=done.tally.good / max(1, done.tally.completed), tok_s=found["output_throughput"],
            within={name: round(done.tally.within[name] / max(1, done.tally.completed), 3) for name in GOOD},
            **{f"{name}_p{percent}": found[f"p{percent}_{name}_ms"]
               for name in ("ttft", "tpot", "itl") for percent in (50, 90, 99)},
            prefill_p50=hops["prefill"]["median_ms"], queue_p50=hops["queue"]["median_ms"],
            fetched={name: now[name] - before.get(name, 0) for name in now},
        )  # fmt: skip
        return found


def fetched(port: int) -> dict[str, float]:
    """What the second worker has fetched so far: blocks by their way, and requests by outcome."""
    names = ("weft_worker_peer_blocks_total{", "weft_worker_peer_fetches_total{")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)}


def free_ports(count: int) -> int:
    """The first of so many ports that follow one another and are free."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        with suppress(OSError, OverflowError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first


async def one(stub: "stubs.InferenceAsyncStub", prompt: Sequence[int], outputs: int) -> list[float]:
    """One request. -> milliseconds to its first message, and between its messages."""
    request = api.GenerateRequest(
        prompt=api.Prompt(token_ids=api.TokenIds(ids=prompt)),
        sampling=api.Sampling(max_tokens=outputs, temperature=0.0, ignore_eos=True),
    )
    times = [time.monotonic()]
    async for response in stub.Generate(request, timeout=60):
        if response.WhichOneof("event") == "delta":
            times.append(time.monotonic())
    return [1e3 * (after - before) for before, after in pairwise(times)]


async def idle(bench: Bench, arrangement: str, up: processes.Up, port: int) -> None:
    """One request at a time. The first ones are not counted: they measure the link. "late": which tokens, from 1,
    came in any answer after more than twice the usual time."""
    source, gaps = random.Random(bench.seed), list[list[float]]()
    before = fetched(port)
    async with aio.insecure_channel(up.gateways[0]) as channel:
        stub: stubs.InferenceAsyncStub = stubs.InferenceStub(channel)
        for _ in range(WARM_REQUESTS + IDLE_REQUESTS):
            prompt = [source.randrange(1000, 5000) for _ in range(bench.arguments.inputs)]
            gaps.append(await one(stub, prompt, bench.arguments.outputs))
    now, counted = fetched(port), gaps[WARM_REQUESTS:]
    between = sorted(gap for each in counted for gap in each[2:])
    late = {at for each in counted for at, gap in enumerate(each[2:], 3) if gap > 2 * statistics.median(between)}
    bench.say(
        f"{arrangement} idle", ttft_p50=statistics.median(each[0] for each in counted),
        seam_p50=statistics.median(each[1] for each in counted), seam_max=max(each[1] for each in counted),
        itl_p50=statistics.median(between), itl_p99=between[int(0.99 * len(between))], late=sorted(late),
        fetched={name: now[name] - before.get(name, 0) for name in now},
    )  # fmt: skip


async def arranged(bench: Bench, arrangement: str) -> None:
    """Starts the mesh of an arrangement and measures its rows."""
    arguments, port = bench.arguments, free_ports(2 + LAST_WORKER)
    roles, own_settings = ARRANGEMENTS[arrangement]
    settings = {
        "WEFT_METRICS_PORT": str(port), "WEFT_GATEWAY_PROCESSES": "4", "ENGINE": arguments.engine,
        "MAX_SEQ_LENGTH": str(2 * (arguments.inputs + arguments.outputs)), "WEFT_LOG_LEVEL": "info",
        **own_settings, **json.loads(arguments.settings),
    }  # fmt: skip
    started = time.monotonic()
    worker = "bench.mesh.servers.handoffs" if "HANDOFFS" in settings else "services.worker"
    async with processes.up(settings, workers=2, model=arguments.model, tls=True, roles=roles, worker=worker) as up:
        address, port = up.gateways[0], port + LAST_WORKER
        bench.say(f"{arrangement} started", seconds=time.monotonic() - started)
        await idle(bench, arrangement, up, port)
        if arguments.idle:
            return
        peak = bench.plan(address, requests=1 << 16, duration_s=arguments.seconds, concurrency=arguments.peak)
        own = (await bench.load(f"{arrangement} peak", peak, port, at_once=arguments.peak))["request_throughput"]
        if arrangement == "replicas" and not arguments.capacity:
            bench.capacity = own
        for share in arguments.shares:
            for of, capacity in (("the replicas'", bench.capacity), ("its own", own)):
                if not capacity or (of == "its own" and capacity == bench.capacity):
                    continue
                rate = share * capacity
                offered = bench.plan(
                    address, requests=max(2, int(rate * arguments.seconds)), concurrency=None, rate=rate,
                    duration_s=2 * arguments.seconds,
                )  # fmt: skip
                await bench.load(f"{arrangement} {share:.0%} of {of} capacity", offered, port, rate=rate)


async def main(arguments: argparse.Namespace) -> None:
    """Measures all arrangements within the limit."""
    bench = Bench(arguments, capacity=arguments.capacity)
    bench.say("machine", **machine.describe())
    async with asyncio.timeout(arguments.limit):
        for arrangement in arguments.arrangements:
            await arranged(bench, arrangement)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrangements", nargs="+", default=["replicas", "divided"], choices=list(ARRANGEMENTS))
    parser.add_argument("--model", default="random:llama-3.1-8b", help="folder, hub id or random:NAME")
    parser.add_argument("--engine", default="gpu")
    parser.add_argument("--settings", default="{}", help="JSON of further environment variables")
    parser.add_argument("--inputs", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--outputs", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7], help="of the capacity")
    parser.add_argument("--capacity", type=float, default=0.0, help="of the replicas, requests a second, if known")
    parser.add_argument("--peak", type=int, default=96, help="requests at once that measure the capacity")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each load")
    parser.add_argument("--idle", action="store_true", help="one request at a time alone")
    parser.add_argument("--limit", type=float, default=440.0, help="seconds of the whole program")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parsed()))
