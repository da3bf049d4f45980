"""Server-sent events of Weft's gateway beside those of smg, in front of the same paced worker in one run.

    python -m bench.links.beside_smg --smg PATH [--streams 64] [--tokens 1000] [--rounds 3] [--answer 64] [--json FILE]

`make bench-smg` installs smg in an environment of its own. Rounds alternate between both gateways; the best round of
each counts. Figures per core divide by the processor time of the gateway, all threads included. The worker's steps take
4 ms, and then 1 ms, which neither gateway can follow: its events have several tokens, so tokens count. At 70% of the
worker's slots, where latencies are measured, each event has one token.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import table
from bench.links import sse
from bench.mesh.processes import paced, processor_s, up
from bench.table import Figure
from weft.load.distribution import Distribution

_START_S = 60.0
_STEPS_MS = (4.0, 1.0)
_ADDED_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Door:
    """A gateway."""

    name: str
    address: str
    """host:port of its HTTP server."""
    pid: int


@dataclass(slots=True)
class Round:
    """What one round of streams has shown."""

    tokens: int = 0
    events: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0
    firsts: Distribution = field(default_factory=Distribution)
    """Milliseconds to the first event."""
    ages: Distribution = field(default_factory=Distribution)
    """Milliseconds from the end of a step to the event of its token."""

    @property
    def per_core(self) -> float:
        """Tokens per second of processor time."""
        return self.tokens / max(self.processor_s, 1e-3)

    @property
    def rate(self) -> float:
        """Tokens per second on the wall."""
        return self.tokens / self.seconds


@contextlib.asynccontextmanager
async def smg(program: str, worker: str) -> AsyncIterator[Door]:
    """smg in front of a worker, once it serves the model."""
    port, metrics_port = _free_ports()
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--worker-urls", f"grpc://{worker}", "--prometheus-port", str(metrics_port)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_S
        while not await asyncio.to_thread(_models, f"http://127.0.0.1:{port}/v1/models"):
            assert process.returncode is None, "smg has ended"
            assert time.monotonic() < deadline, "smg serves no model"
            await asyncio.sleep(0.2)
        yield Door("smg", f"127.0.0.1:{port}", process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _free_ports() -> tuple[int, int]:
    """Two ports that are free now."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])


def _models(url: str) -> list[Any]:
    """The models that an HTTP server lists; none while it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return list(json.load(response)["data"])
    except (OSError, ValueError, KeyError):
        return []


def _body(number: int, model: str, tokens: int) -> dict[str, Any]:
    """The same request for both gateways; its prompt is text, because smg takes no token ids."""
    words = random.Random(number).choices(("fox", "owl", "mill", "wood", "king", "river"), k=16)
    return {"model": model, "prompt": " ".join(words), "max_tokens": tokens, "ignore_eos": True}


async def throughput(door: Door, model: str, streams: int, tokens: int) -> Round:
    """Sends 2 * `streams` requests for this many tokens each, at most `streams` at a time, and counts their events and
    processor time."""
    round_, limit = Round(tokens=2 * streams * tokens), asyncio.Semaphore(streams)

    def on_chunk(count: int, _: float) -> None:
        round_.events += count

    async def one(number: int) -> None:
        async with limit:
            await sse.stream(door.address, _body(number, model, tokens), on_chunk)

    used, began = processor_s(door.pid), time.monotonic()
    await asyncio.gather(*(one(number) for number in range(2 * streams)))
    round_.processor_s, round_.seconds = processor_s(door.pid) - used, time.monotonic() - began
    return round_


async def latency(door: Door, model: str, batch: int, requests: int, tokens: int) -> Round:
    """Streams of `tokens` that arrive as a Poisson process at 70% of the worker's slots."""
    round_ = Round(tokens=requests * tokens)
    rate = 0.7 * batch / (tokens * _ADDED_STEP_S)
    chance, due = random.Random(7), time.monotonic()

    async def one(number: int) -> None:
        began, first = time.monotonic(), True

        def on_chunk(count: int, now: float) -> None:
            nonlocal first
            if first:
                round_.firsts.add((now - began) * 1e3)
                first = False
            round_.events += count
            for _ in range(count):
                round_.ages.add(now % _ADDED_STEP_S * 1e3)

        await sse.stream(door.address, _body(number, model, tokens), on_chunk)

    used = processor_s(door.pid)
    async with asyncio.TaskGroup() as tasks:
        for number in range(requests):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(one(number))
            due += chance.expovariate(rate)
    round_.processor_s = processor_s(door.pid) - used
    return round_


async def measure(program: str, streams: int, tokens: int, requests: int, rounds: int, answer: int) -> list[Figure]:
    """The figures of both gateways, each beside the other's. `answer`: tokens of a stream at 70% of the slots."""
    figures: list[Figure] = []
    for step_ms in _STEPS_MS:
        best: dict[str, Round] = {}
        async with up(paced(step_ms, batch=streams)) as mesh, smg(program, mesh.worker) as other:
            model = (await asyncio.to_thread(_models, f"http://{other.address}/v1/models"))[0]["id"]
            doors = Door("Weft", mesh.http, mesh.pid("gateway")), other
            for turn in range(rounds):
                for door in doors if turn % 2 == 0 else doors[::-1]:
                    found = await throughput(door, model, streams, tokens)
                    if door.name not in best or found.per_core > best[door.name].per_core:
                        best[door.name] = found
        figures += _rates(step_ms, best)
    late: dict[str, Round] = {}
    async with up(paced(_ADDED_STEP_S * 1e3, batch=streams)) as mesh, smg(program, mesh.worker) as other:
        for door in (Door("Weft", mesh.http, mesh.pid("gateway")), other):
            late[door.name] = await latency(door, model, streams, requests, answer)
    return [*figures, *_latencies(late)]


def _rates(step_ms: float, best: dict[str, Round]) -> list[Figure]:
    steps = f"steps of {step_ms:g} ms"
    figures = [
        Figure(
            f"{name}, {steps}: tokens per second of its processor time",
            round_.per_core,
            "tokens/s",
            note=f"{round_.rate:,.0f} tokens/s on the wall, in {round_.events:,} events",
        )
        for name, round_ in best.items()
    ]
    ours, theirs = best["Weft"], best["smg"]
    return [
        *figures,
        Figure(f"Weft over smg, {steps}: by processor time", ours.per_core / theirs.per_core, "times", ">= 1"),
        Figure(f"Weft over smg, {steps}: on the wall", ours.rate / theirs.rate, "times", ">= 1"),
    ]


def _latencies(late: dict[str, Round]) -> list[Figure]:
    figures = []
    for name, round_ in late.items():
        each = Figure(f"{name}: processor time of an event", 1e6 * round_.processor_s / max(1, round_.events), "us")
        figures.append(each)
        for what, values in (("first event", round_.firsts), ("added to an event", round_.ages)):
            note = f"p99 {values.percentile(99):.2f} ms"
            figures.append(Figure(f"{name}: {what}, p50", values.percentile(50), "ms", note=note))
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Server-sent events beside smg's, before the same worker.")
    parser.add_argument("--smg", required=True, help="the program smg")
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream")
    parser.add_argument("--requests", type=int, default=300, help="requests of the measurement of latencies")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each stream of that measurement")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each gateway")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    out = Console(width=150 if not sys.stdout.isatty() else None)
    table.show_machine(out)
    figures = asyncio.run(measure(asked.smg, asked.streams, asked.tokens, asked.requests, asked.rounds, asked.answer))
    table.show("Server-sent events beside smg, before the same paced worker", figures, out)
    if asked.json:
        table.save(asked.json, figures)


if __name__ == "__main__":
    main()
