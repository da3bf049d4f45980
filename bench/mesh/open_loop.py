"""Constant rates of short requests through the one public port, overload, closed loops, and thousands of streams.

    python -m bench.mesh.open_loop [--rows grpc@1000 grpc@2500 grpc@x4 http@1000 closed@256 streams@5000] [--seconds 60]
                                   [--model random:llama-3.2-1b --engine gpu] [--cores 16] [--lines] [--out FILE]
                                   [--clients 4] [--connections 16] [--gateways 0] [--steady]

Starts the mesh as `weft serve` does, with as many gateway processes as the cores allow. A row is a kind of load and
its size. grpc@1000 and http@1000 are an open loop of 1,000 requests/s from several client processes: a request is sent
when it is due, whether or not others have ended; it has 16 tokens in and 16 out and is not streamed. grpc@x4 sends four
times the most that was answered in the rows before it. closed@256 has that many clients, each of which sends its next
request of 128 tokens in and out as soon as the last one has ended, refused or not: three for each client, all at once
at first. streams@5000 has that many streams at a time, of 12 tokens/s each, on a mesh of its own. Without --engine the
worker runs the paced engine, whose step of the short requests takes 2 ms: with --batch 64 it answers at most 2,000 of
them in a second, with the default as many as its process can deliver.

With --cores N the mesh runs on N cores and the clients on the others, which --steady keeps busy: else a machine whose
cores slow one another down would be slower at a higher rate because the clients use more of it. Each row shows the
cores that the processes of a service used, and the processor time of it for an answer, so that the process that bounds
the rate is visible. "good/s" are answers in a second without the first three seconds; "lag" is how much later than due
the clients sent. A row ends at once, and the run with it, if a process of the mesh ends.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.mesh import busy_cores, processes
from bench.mesh.usage import Usage
from report import machine
from report.console import console
from services.host import available_cores
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run
from weft.load.tally import SECOND, Tally

SHORT = 16
CLOSED, ROUNDS = 128, 3
"""Tokens in and out of the requests of a closed loop, and requests for each client of it."""
TOKENS_PER_S = 12.0
MOST_BATCH = 4096
"""Most answers at once of a worker (MAX_BATCH_SIZE)."""
CALM_S = 11.0
"""Time between two loads: what the first one left is done, and the gateways take all calls again."""
SKIPPED_S = 3
SERVICES = ("gateway", "scheduler", "worker", "clients")
COLUMNS = (
    "load", "sent/s", "good/s", "p50 ms", "p99 ms", "failed", "refused", "refusal p99", "inside p99", "lag p99",
    *SERVICES,
)  # fmt: skip
DEFAULT_ROWS = (
    "closed@256", "closed@512", "grpc@1000", "grpc@2500", "grpc@x4", "http@1000", "http@2500", "http@x4",
    "streams@5000",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One load and its figures."""

    name: str
    values: Mapping[str, Any]
    cores: Mapping[str, float]
    """Cores that each service used."""
    used_s: Mapping[str, float]
    """Processor time of each service."""
    warmup: int
    memory: int
    """Most bytes that the gateways had resident."""

    def cells(self) -> list[str]:
        """The cells of the table."""
        v = self.values
        latency = "ttft" if self.name.startswith("streams") else "e2el"
        refused = sum(n for name, n in v["errors"].items() if "RESOURCE_EXHAUSTED" in name or "HTTP 429" in name)
        return [
            self.name, f"{v['sent_per_s']:.0f}", f"{v['good_per_s']:.0f}", f"{v[f'median_{latency}_ms']:.1f}",
            f"{v[f'p99_{latency}_ms']:.1f}", str(v["failed"] - refused), str(refused),
            f"{v['p99_refusal_ms']:.1f}" if "p99_refusal_ms" in v else "",
            f"{v['p99_refusal_inside_ms']:.1f}" if v["p99_refusal_inside_ms"] else "",
            f"{v['p99_send_lag_ms']:.1f}" if "p99_send_lag_ms" in v else "",
            *(f"{self.cores[name]:.2f}, {self.each_ms[name]:.2f} ms" for name in SERVICES),
        ]  # fmt: skip

    @property
    def each_ms(self) -> dict[str, float]:
        """Processor time of each service for an answer, in ms, with what refusals and the warm-up cost."""
        answers = max(1, self.values["completed"] + self.warmup)
        return {name: 1e3 * used / answers for name, used in self.used_s.items()}

    def line(self) -> str:
        """The figures of the table as a line of JSON."""
        cells = dict(zip(COLUMNS, self.cells(), strict=True))
        own = {"errors": self.values["errors"], "gateways_mib": self.memory >> 20}
        each = {"kib_a_stream": round(self.values["kib_a_stream"], 1)} if "kib_a_stream" in self.values else {}
        return json.dumps({**cells, **own, **each})

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        own = {"name": self.name, "cores": dict(self.cores), "each_ms": self.each_ms, "memory": self.memory}
        return {**own, **self.values}


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
        if "kib_a_stream" in row.values:
            idle, each = row.values["idle_memory"] >> 20, row.values["kib_a_stream"]
            console().print(f"memory of the gateways: {idle} MiB idle, {row.memory >> 20} MiB, {each:.0f} KiB a stream")


class Report:
    """Shows and saves each row as soon as it is done."""

    def __init__(self, lines: bool, file: Path | None) -> None:
        """`lines`: rows are shown as lines of JSON instead of tables; `file` gets the figures of all rows."""
        self.rows: list[Row] = []
        self._lines, self._file = lines, file

    def __call__(self, row: Row) -> None:
        """Adds a row."""
        self.rows.append(row)
        if self._lines:
            print(row.line(), flush=True)
        else:
            show([row])
        if self._file:
            data = {"machine": machine.describe(), "rows": [each.to_json() for each in self.rows]}
            self._file.write_text(json.dumps(data, indent=1) + "\n")


async def measured(up: processes.Up, name: str, plan: Plan) -> Row:
    """Runs one load. Raises Died, RunError and what the client raises."""
    await asyncio.sleep(CALM_S)
    usage = Usage(up)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(usage.follow())
        done = await run(plan)
        used, used_s = usage.cores(), usage.used_s()
        watch.cancel()
    tally, duration_s = done.tally, plan.duration_s or done.tally.last_ended or 1.0
    clients_s = tally.processor_s
    values = metrics.figures(tally)
    values["sent_per_s"] = (values["completed"] + values["failed"]) / duration_s
    values["good_per_s"] = good_per_s(tally, plan.duration_s) or values["request_throughput"]
    values["p99_refusal_inside_ms"] = tally.refusals_inside.percentile(99)
    return Row(
        name, {**values, "errors": dict(tally.errors)}, {**used, "clients": clients_s / duration_s},
        {**used_s, "clients": clients_s}, plan.warmup, usage.memory,
    )  # fmt: skip


def good_per_s(tally: Tally, duration_s: float | None) -> float:
    """Answers in a second while the load was sent, without the first seconds; 0 for loads that are shorter."""
    counted = range(SKIPPED_S, int(duration_s or 0))
    place = SECOND.index("answered")
    return sum(tally.seconds.get(second, [0] * len(SECOND))[place] for second in counted) / max(1, len(counted))


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


async def short_rows(names: Sequence[str], arguments: argparse.Namespace, report: Report) -> None:
    """The rows of short requests, on one mesh."""
    most = dict.fromkeys(("grpc", "http"), 0.0)
    paced = settings(arguments, step_ms=2.0, batch=arguments.batch or 512)
    async with processes.up(paced, model=arguments.model, cores=arguments.cores) as up, steady(arguments):
        for name in names:
            kind, _, size = name.partition("@")
            if kind == "closed":
                report(await measured(up, name, closed(up, int(size), arguments)))
                continue
            rate = float(size[1:]) * most[kind] if size.startswith("x") else float(size)
            row = await measured(up, f"{name}: {rate:.0f}/s", short(up, kind, rate, arguments))
            most[kind] = max(most[kind], row.values["good_per_s"])
            report(row)


@contextlib.asynccontextmanager
async def steady(arguments: argparse.Namespace) -> AsyncIterator[None]:
    """Keeps the cores of the clients, which are this process's, busy within the block, if that is asked for."""
    with busy_cores.busy(os.sched_getaffinity(0)) if arguments.steady else contextlib.nullcontext():
        yield


async def stream_rows(name: str, arguments: argparse.Namespace, report: Report) -> None:
    """The row of many streams."""
    count = int(name.partition("@")[2])
    places = 2 * count
    workers = 1 if arguments.engine else -(-places // MOST_BATCH)
    paced = settings(arguments, step_ms=1000 / TOKENS_PER_S, batch=-(-places // workers))
    async with processes.up(paced, workers=workers, model=arguments.model, cores=arguments.cores) as up:
        idle = Usage(up).resident()
        row = await measured(up, name, streams(up, count, arguments))
    each = (row.memory - idle) / count / 1024
    report(replace(row, values={**row.values, "idle_memory": idle, "kib_a_stream": each}))


def settings(arguments: argparse.Namespace, *, step_ms: float, batch: int) -> dict[str, str]:
    """The environment of the mesh."""
    own = {"WEFT_GATEWAY_PROCESSES": str(arguments.gateways)}
    if arguments.engine:
        batch = arguments.batch or 256
        return {"ENGINE": arguments.engine, "MAX_BATCH_SIZE": str(batch), "WEFT_PREFIX_FETCH": "false", **own}
    return {**processes.paced(step_ms, batch=batch), **own}


async def main(arguments: argparse.Namespace) -> None:
    """Measures and prints everything."""
    console().print(f"{machine.describe()['cpu']}, {available_cores()} cores", markup=False)
    report = Report(arguments.lines, arguments.out)
    if names := [name for name in arguments.rows if not name.startswith("streams")]:
        await short_rows(names, arguments, report)
    for name in arguments.rows:
        if name.startswith("streams"):
            await stream_rows(name, arguments, report)
    console().print("all loads", style="bold")
    show(report.rows)


def row_name(text: str) -> str:
    """Checks the name of a row."""
    if not re.fullmatch(r"(grpc|http)@(x?\d+(\.\d+)?)|(closed|streams)@\d+", text):
        raise argparse.ArgumentTypeError(f"{text} is not grpc@RATE, grpc@xTIMES, http@..., closed@N or streams@N")
    return text


def unfounded(names: Sequence[str]) -> str:
    """The first row that is a multiple of what the rows of its protocol before it have shown, where there are none;
    empty if there is no such row."""
    known: set[str] = set()
    for name in names:
        kind, _, size = name.partition("@")
        if size.startswith("x") and kind not in known:
            return name
        known.add(kind)
    return ""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Open loops through the one public port.")
    parser.add_argument("--rows", type=row_name, nargs="+", default=DEFAULT_ROWS, help=" ".join(DEFAULT_ROWS))
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each load (default 60)")
    parser.add_argument("--cores", type=int, default=0, help="cores of the mesh alone (default: all, shared)")
    parser.add_argument("--steady", action="store_true", help="keep the clients' cores busy in every row")
    parser.add_argument("--gateways", type=int, default=0, help="gateway processes (default: as the cores allow)")
    parser.add_argument("--clients", type=int, default=0, help="client processes (default: a quarter of the cores)")
    parser.add_argument("--connections", type=int, default=16, help="connections of each client (default 16)")
    parser.add_argument("--model", default="", help="folder, hub id or random:NAME (default: the demo model)")
    parser.add_argument("--engine", default="", choices=["", "gpu", "torch"], help="default: the paced engine")
    parser.add_argument("--batch", type=int, default=0, help="of a worker (default: 256, of the paced engine 512)")
    parser.add_argument("--lines", action="store_true", help="print each row as a line of JSON")
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    if name := unfounded(arguments.rows):
        parser.error(f"{name} needs a row {name.partition('@')[0]}@RATE before it")
    if arguments.steady and not arguments.cores:
        parser.error("--steady needs --cores: else the clients have no cores of their own")
    arguments.clients = arguments.clients or max(1, available_cores() // 4)
    return arguments


if __name__ == "__main__":
    asyncio.run(main(parsed()))
