"""Constant rates of short requests through the one public port, overload, closed loops, and thousands of streams.

    python -m bench.mesh.open_loop [--closed 256 512] [--rates 1000 2500] [--seconds 60] [--doors grpc http]
                                   [--overload 4] [--streams 5000] [--model random:llama-3.2-1b --engine gpu]
                                   [--clients 4] [--connections 16] [--gateways 1]

Starts the mesh as `weft serve` does, with as many gateway processes as the cores allow. The load is an open loop from
several client processes: a request is sent when it is due, whether or not others have ended. Requests have 16 tokens in
and 16 out and are not streamed; streams have 12 tokens/s each. Without --engine the worker runs the paced engine, whose
step of the short requests takes 2 ms. Closed loops have that many clients, each of which sends its next request of 128
tokens in and out as soon as the last one has ended, refused or not: three for each client, all at once at first.

Each row shows the cores that the processes of a service used, and the processor time of it for an answer, so that the
process that bounds the rate is visible.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.mesh import processes
from report import machine
from report.console import console
from services.host import available_cores
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run

SHORT = 16
CLOSED, ROUNDS = 128, 3
"""Tokens in and out of the requests of a closed loop, and requests for each client of it."""
TOKENS_PER_S = 12.0
SAMPLE_S = 0.5
MOST_BATCH = 4096
"""Most answers at once of a worker (MAX_BATCH_SIZE)."""
CALM_S = 5.0
"""Time between two loads: what the first one left is done, and the gateways take all calls again."""
SERVICES = ("gateways", "scheduler", "worker")
COLUMNS = (
    "load", "sent/s", "done/s", "p50 ms", "p99 ms", "failed", "refused", "refusal p99",
    *SERVICES,
)  # fmt: skip


@dataclass(slots=True)
class Usage:
    """Processor time and memory of the processes of a mesh, sampled while a load runs."""

    up: processes.Up
    began: float = field(default_factory=time.monotonic)
    start: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    """Most bytes that all gateway processes had resident at once."""

    def pids(self) -> dict[str, list[int]]:
        """The processes of each service."""
        gateway = self.up.pid("gateway")
        children = Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split()
        return {
            "gateways": [gateway, *map(int, children)],
            "scheduler": [self.up.pid("scheduler")],
            "worker": self.up.workers(),
        }

    def processor_s(self) -> dict[str, float]:
        """Processor time that each service has used."""
        return {name: sum(map(processes.processor_s, pids)) for name, pids in self.pids().items()}

    async def follow(self) -> None:
        """Samples until cancelled."""
        self.start, self.began = self.processor_s(), time.monotonic()
        while True:
            self.memory = max(self.memory, self.resident())
            await asyncio.sleep(SAMPLE_S)

    def resident(self) -> int:
        """Bytes that all gateway processes have resident."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids()["gateways"])
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def used_s(self) -> dict[str, float]:
        """Processor time that each service has used since the start."""
        return {name: used - self.start[name] for name, used in self.processor_s().items()}

    def cores(self) -> dict[str, float]:
        """Cores that each service has used since the start."""
        elapsed = time.monotonic() - self.began
        return {name: used / elapsed for name, used in self.used_s().items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One load and its figures."""

    name: str
    values: Mapping[str, Any]
    cores: Mapping[str, float]
    used_s: Mapping[str, float]
    """Processor time of each service."""
    warmup: int
    memory: int

    def cells(self) -> list[str]:
        """The cells of the table."""
        v = self.values
        latency = "ttft" if self.name.startswith("streams") else "e2el"
        refused = sum(n for name, n in v["errors"].items() if "RESOURCE_EXHAUSTED" in name or "HTTP 429" in name)
        return [
            self.name, f"{v['sent_per_s']:.0f}", f"{v['request_throughput']:.0f}", f"{v[f'median_{latency}_ms']:.1f}",
            f"{v[f'p99_{latency}_ms']:.1f}", str(v["failed"] - refused), str(refused),
            f"{v['p99_refusal_ms']:.1f}" if "p99_refusal_ms" in v else "",
            *(f"{self.cores[name]:.2f}, {self.each_ms[name]:.2f} ms" for name in SERVICES),
        ]  # fmt: skip

    @property
    def each_ms(self) -> dict[str, float]:
        """Processor time of each service for an answer, in ms, with what refusals and the warm-up cost."""
        answers = max(1, self.values["completed"] + self.warmup)
        return {name: 1e3 * used / answers for name, used in self.used_s.items()}


async def measured(up: processes.Up, name: str, plan: Plan) -> Row:
    """Runs one load."""
    await asyncio.sleep(CALM_S)
    usage = Usage(up)
    async with processes.meanwhile(usage.follow()):
        done = await run(plan)
        cores, used_s = usage.cores(), usage.used_s()
    values = metrics.figures(done.tally)
    duration_s = plan.duration_s or done.tally.last_ended or 1.0
    values["sent_per_s"] = (values["completed"] + values["failed"]) / duration_s
    return Row(name, {**values, "errors": dict(done.tally.errors)}, cores, used_s, plan.warmup, usage.memory)


def short(up: processes.Up, door: str, rate: float, arguments: argparse.Namespace) -> Plan:
    """A constant rate of short requests."""
    return Plan(
        up.gateways[0], http=up.http if door == "http" else "", stream=False, constant=True, rate=rate,
        requests=int(rate * arguments.seconds), duration_s=arguments.seconds, concurrency=None, input_tokens=SHORT,
        output_tokens=SHORT, cache="bypass", deadline_s=30.0, warmup=8 * arguments.clients,
        processes=arguments.clients, connections=arguments.connections, seed=int(time.time()),
    )  # fmt: skip


def closed(up: processes.Up, count: int, arguments: argparse.Namespace) -> Plan:
    """A closed loop of `count` clients."""
    return Plan(
        up.gateways[0], requests=ROUNDS * count, concurrency=count, input_tokens=CLOSED, output_tokens=CLOSED,
        cache="bypass", deadline_s=120.0, warmup=8 * arguments.clients, processes=arguments.clients,
        connections=arguments.connections, seed=int(time.time()),
    )  # fmt: skip


def streams(up: processes.Up, count: int, arguments: argparse.Namespace) -> Plan:
    """As many streams at once, which begin evenly spread over the time that one takes: a third of the measurement."""
    stream_s = arguments.seconds / 3
    return Plan(
        up.gateways[0], constant=True, rate=count / stream_s, requests=int(3 * count), duration_s=arguments.seconds,
        concurrency=None, input_tokens=SHORT, output_tokens=max(2, round(TOKENS_PER_S * stream_s)), cache="bypass",
        deadline_s=600.0, warmup=0, processes=arguments.clients, connections=arguments.connections,
    )  # fmt: skip


async def short_rows(arguments: argparse.Namespace) -> list[Row]:
    """The rows of short requests, and of four times the most that was done."""
    rows: list[Row] = []
    async with processes.up(settings(arguments, step_ms=2.0, batch=512), model=arguments.model) as up:
        for count in arguments.closed:
            rows.append(await measured(up, f"{count} clients", closed(up, count, arguments)))
            show(rows[-1:])
        for door in arguments.doors:
            own = []
            for rate in arguments.rates:
                own.append(await measured(up, f"{door} {rate:g}/s", short(up, door, rate, arguments)))
                show([own[-1]])
            if own and arguments.overload:
                peak = max(float(row.values["request_throughput"]) for row in own)
                rate = arguments.overload * peak
                own.append(await measured(up, f"{door} overload {rate:.0f}/s", short(up, door, rate, arguments)))
                show([own[-1]])
            rows += own
    return rows


async def stream_rows(arguments: argparse.Namespace) -> list[Row]:
    """The row of many streams."""
    places = 2 * arguments.streams
    workers = 1 if arguments.engine else -(-places // MOST_BATCH)
    paced = settings(arguments, step_ms=1000 / TOKENS_PER_S, batch=-(-places // workers))
    async with processes.up(paced, workers=workers, model=arguments.model) as up:
        idle = Usage(up).resident()
        row = await measured(up, f"streams {arguments.streams}", streams(up, arguments.streams, arguments))
    each = (row.memory - idle) / arguments.streams / 1024
    console().print(f"memory of the gateways: {idle >> 20} MiB idle, {row.memory >> 20} MiB, {each:.0f} KiB a stream")
    return [row]


def settings(arguments: argparse.Namespace, *, step_ms: float, batch: int) -> dict[str, str]:
    """The environment of the mesh."""
    own = {"WEFT_GATEWAY_PROCESSES": str(arguments.gateways)}
    if arguments.engine:
        return {"ENGINE": arguments.engine, "MAX_BATCH_SIZE": str(arguments.batch), **own}
    return {**processes.paced(step_ms, batch=batch), **own}


def show(rows: Sequence[Row]) -> None:
    """Prints rows as a table."""
    table = Table(*COLUMNS, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row.cells())
    console().print(table)
    for row in rows:
        unexpected = {name: n for name, n in row.values["errors"].items() if n}
        if unexpected:
            console().print(f"{row.name}: {unexpected}", markup=False)


async def main(arguments: argparse.Namespace) -> None:
    """Measures and prints everything."""
    console().print(f"{machine.describe()['cpu']}, {available_cores()} cores", markup=False)
    rows = await short_rows(arguments) if arguments.rates or arguments.closed else []
    if arguments.streams:
        rows += await stream_rows(arguments)
    console().print("all loads", style="bold")
    show(rows)
    if arguments.out:
        data = [
            {"name": r.name, "cores": dict(r.cores), "each_ms": r.each_ms, "memory": r.memory, **r.values} for r in rows
        ]
        arguments.out.write_text(json.dumps({"machine": machine.describe(), "rows": data}, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Open loops through the one public port.")
    parser.add_argument("--closed", type=int, nargs="*", default=[256, 512], help="clients (default 256 512)")
    parser.add_argument("--rates", type=float, nargs="*", default=[1000, 2500], help="requests/s (default 1000 2500)")
    parser.add_argument("--doors", nargs="+", choices=["grpc", "http"], default=["grpc", "http"])
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each load (default 60)")
    parser.add_argument("--overload", type=float, default=4, help="times the most that was done; 0: none (default 4)")
    parser.add_argument("--streams", type=int, default=5000, help="concurrent streams; 0: none (default 5000)")
    parser.add_argument("--gateways", type=int, default=0, help="gateway processes (default: as the cores allow)")
    parser.add_argument("--clients", type=int, default=max(1, available_cores() // 4), help="client processes")
    parser.add_argument("--connections", type=int, default=16, help="gRPC connections of each client (default 16)")
    parser.add_argument("--model", default="", help="folder, hub id or random:NAME (default: the demo model)")
    parser.add_argument("--engine", default="", choices=["", "gpu", "torch"], help="default: the paced engine")
    parser.add_argument("--batch", type=int, default=256, help="batch of an engine that is not paced (default 256)")
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parsed()))
