"""Ten times the load that a worker can take: goodput, refusals, and how soon new requests are served afterwards.

    python -m bench.mesh.overload [--seconds 60] [--times 10] [--engines paced torch] [--batch 64]
                                  [--threads 1] [--cores 16] [--out overload.html]

For each engine, once with deadlines of 30 s and once with three times an answer's duration: the peak is measured with
as many requests at once as the batch holds, four of which are control streams, whose tokens do not count. Then an open
loop sends `--times` as many requests as the peak for `--seconds`, and half a second after it half of the peak for 10 s
with the same deadlines. Goodput counts answers that ended before their deadline from the third second of the burst to
its end; an answer that comes too late is no answer. Refusals include requests that waited and were dropped; "inside" is
the part of their time within the gateway. Of the requests after the burst the table has the share that was answered,
and the longest time to the first token. Four control streams begin with the burst, too: the p99 between two tokens
stands beside that at the peak. With --threads the worker computes with that many threads on as many cores, which no
other process uses. With --cores N the mesh, its worker included, runs on N cores and the clients on the others.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.mesh import cores, processes
from report import html, machine, plot
from report.console import console
from report.plot import Axis, Line
from services.host import available_cores
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import Run, run
from weft.load.tally import SECOND

INPUT, OUTPUT, STEP_MS = 16, 50, 20.0
PEAK_S, CALM_S, AFTER_S, SKIPPED_S = 10.0, 0.5, 10.0, 3
LONG_S, SHORT_TIMES = 30.0, 3.0
COLUMNS = (
    "engine", "deadline", "peak/s", "goodput/s", "of peak", "refused", "p50 ms", "p99 ms", "inside p99", "late",
    "other failures", "after: served", "first token", "control p99 ms", "at peak",
)  # fmt: skip
GOALS = {"of peak": "0.95 (30 s), 0.90", "inside p99": "10 ms", "first token": "3 s"}
CONTROLS, CONTROL_TOKENS, PEAK_CONTROL_TOKENS = 4, 1800, 200


@dataclass(frozen=True, slots=True)
class Result:
    """One burst and the requests after it."""

    engine: str
    deadline_s: float
    peak: float
    seconds: float
    burst: Run
    after: Run
    control: Run
    peak_gap_ms: float
    """The time between two tokens at the peak, p99."""

    @property
    def goodput(self) -> float:
        """Answers a second in time, without the first seconds of the burst."""
        place = SECOND.index("answered")
        counted = range(min(SKIPPED_S, int(self.seconds) - 1), int(self.seconds))
        return sum(self.burst.tally.seconds.get(second, [0] * len(SECOND))[place] for second in counted) / len(counted)

    def cells(self) -> list[str]:
        """The cells of the table."""
        tally, after = self.burst.tally, self.after.tally
        late = sum(n for name, n in tally.errors.items() if name.startswith("DEADLINE_EXCEEDED")) - self.unmeetable
        refused = tally.refusals.count
        first = after.latencies["ttft"]
        return [
            self.engine, f"{self.deadline_s:.1f} s", f"{self.peak:.1f}", f"{self.goodput:.1f}",
            f"{self.goodput / self.peak:.2f}", str(refused), f"{tally.refusals.percentile(50):.1f}" if refused else "",
            f"{tally.refusals.percentile(99):.1f}" if refused else "",
            f"{tally.refusals_inside.percentile(99):.1f}" if refused else "", str(late),
            str(tally.failed - refused - late), f"{after.completed / max(1, after.completed + after.failed):.2f}",
            f"{first.greatest / 1e3:.2f} s" if first.count else "",
            f"{self.control.tally.latencies['itl'].percentile(99):.0f}", f"{self.peak_gap_ms:.0f}",
        ]  # fmt: skip

    @property
    def unmeetable(self) -> int:
        """Requests that were refused because their deadline could not be met."""
        return self.burst.tally.errors["DEADLINE_EXCEEDED/DEADLINE_UNMEETABLE"]

    def chart(self) -> str:
        """Requests of the burst and after it by second: sent, answered."""
        sums: dict[int, list[int]] = {}
        for tally in (self.burst.tally, self.after.tally):
            for second, counts in tally.seconds.items():
                line = sums.setdefault(second, [0] * len(SECOND))
                for place, count in enumerate(counts):
                    line[place] += count
        series = [
            Line(name, [(float(second), float(counts[SECOND.index(name)])) for second, counts in sorted(sums.items())])
            for name in ("started", "ended", "answered")
        ]
        title = f"{self.engine}, deadlines of {self.deadline_s:.1f} s"
        return html.card(title, plot.lines(series, Axis("seconds"), Axis("requests in each second")), wide=True)

    def line(self) -> str:
        """The figures of the table as a line of JSON."""
        cells = dict(zip(COLUMNS, self.cells(), strict=True))
        return json.dumps({**cells, "errors": dict(self.burst.tally.errors)})

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "engine": self.engine, "deadline_s": self.deadline_s, "peak": self.peak, "goodput": self.goodput,
            "burst": metrics.figures(self.burst.tally), "errors": dict(self.burst.tally.errors),
            "after": metrics.figures(self.after.tally), "errors_after": dict(self.after.tally.errors),
            "control": metrics.figures(self.control.tally), "peak_gap_ms": self.peak_gap_ms,
        }  # fmt: skip


def plan(address: str, arguments: argparse.Namespace, **changes: Any) -> Plan:
    """A load of answers of 50 tokens."""
    values: dict[str, Any] = {
        "input_tokens": INPUT, "output_tokens": OUTPUT, "cache": "bypass", "processes": arguments.clients,
        "connections": 8, "warmup": 0, "constant": True, "seed": time.time_ns() % (1 << 31), **changes,
    }  # fmt: skip
    return Plan(address, **values)


async def peak(address: str, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Answers a second with a full batch, the duration of one in seconds, and the p99 between two tokens in ms."""
    values = {"requests": 1 << 20, "duration_s": PEAK_S}
    load = plan(address, arguments, concurrency=arguments.batch - CONTROLS, warmup=8, **values)
    control = plan(address, arguments, concurrency=CONTROLS, processes=1, output_tokens=PEAK_CONTROL_TOKENS, **values)
    done, _ = await asyncio.gather(run(load), run(control))
    figures = metrics.figures(done.tally)
    return float(figures["request_throughput"]), float(figures["median_e2el_ms"]) / 1e3, float(figures["p99_itl_ms"])


async def overloaded(
    engine: str, up: processes.Up, deadline_s: float, most: float, gap_ms: float, arguments: argparse.Namespace
) -> Result:
    """The burst, and the requests after it, which are prepared before it."""
    address, rate = up.gateways[0], arguments.times * most
    burst = plan(
        address, arguments, rate=rate, requests=int(rate * arguments.seconds), concurrency=None, deadline_s=deadline_s
    )
    after = plan(
        address, arguments, rate=most / 2, requests=max(2, int(most / 2 * AFTER_S)), concurrency=None,
        deadline_s=deadline_s, delay_s=arguments.seconds + CALM_S,
    )  # fmt: skip
    control = plan(
        address, arguments, requests=CONTROLS, concurrency=CONTROLS, processes=1, output_tokens=CONTROL_TOKENS
    )
    results = await asyncio.gather(run(burst), run(after), run(control))
    return Result(engine, deadline_s, most, arguments.seconds, *results, gap_ms)


async def measured(engine: str, arguments: argparse.Namespace) -> list[Result]:
    """Both bursts of one engine, each on the same mesh."""
    own = {"WEFT_GATEWAY_PROCESSES": "0"}
    if engine == "paced":
        settings = {**processes.paced(STEP_MS, batch=arguments.batch), **own}
    else:
        settings = {"ENGINE": engine, "MAX_BATCH_SIZE": str(arguments.batch), **own}
        if arguments.threads:
            settings["WEFT_THREADS"] = str(arguments.threads)
    results = []
    async with processes.up(settings, model=arguments.model, cores=arguments.cores) as up:
        if arguments.threads:
            isolate(up, arguments.threads, ours=not arguments.cores)
        for long in (True, False):
            # The machine's speed changes: a burst is compared with what the mesh takes just before it.
            most, answer_s, gap_ms = await peak(up.gateways[0], arguments)
            deadline_s = LONG_S if long else SHORT_TIMES * answer_s
            results.append(await overloaded(engine, up, deadline_s, most, gap_ms, arguments))
            show(results[-1:])
            if arguments.lines:
                print(results[-1].line(), flush=True)
    return results


def isolate(up: processes.Up, count: int, *, ours: bool) -> None:
    """Gives the worker `count` of the mesh's cores; its other processes, and this one if `ours`, get the rest."""
    running = up.running()
    own, rest = cores.divided(count, of=running["worker"][0])
    for name, pids in {**running, "clients": [os.getpid()] if ours else []}.items():
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), own if name == "worker" else rest)


def show(results: Sequence[Result]) -> None:
    """Prints the table."""
    table = Table(*COLUMNS, box=box.SIMPLE)
    for result in results:
        table.add_row(*result.cells())
    console().print(table)


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints the table, and writes the page."""
    results = [result for engine in arguments.engines for result in await measured(engine, arguments)]
    console().print("all bursts; goals: " + ", ".join(f"{name} {goal}" for name, goal in GOALS.items()), style="bold")
    show(results)
    for result in results:
        console().print(f"{result.engine} {result.deadline_s:.1f} s: {dict(result.burst.tally.errors)}", markup=False)
    if arguments.out:
        table = html.table(list(COLUMNS), [result.cells() for result in results])
        cards = html.cards([html.card("Overload", table, wide=True), *(result.chart() for result in results)])
        data = {"machine": machine.describe(), "results": [result.to_json() for result in results]}
        below = f"{arguments.times:g} times the peak for {arguments.seconds:g} s, {json.dumps(machine.describe())}"
        arguments.out.write_text(html.document("weft bench-overload", below, [cards], data))
        console().print(f"report: {arguments.out}", markup=False)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Overload: goodput, refusals, recovery.")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of a burst (default 60)")
    parser.add_argument("--times", type=float, default=10, help="times the peak (default 10)")
    parser.add_argument("--engines", nargs="+", choices=["paced", "torch", "gpu"], default=["paced", "torch"])
    parser.add_argument("--model", default="", help="folder, hub id or random:NAME (default: the demo model)")
    parser.add_argument("--batch", type=int, default=64, help="requests at once (default 64)")
    parser.add_argument("--threads", type=int, default=0, help="cores reserved for the worker (default: none)")
    parser.add_argument("--cores", type=int, default=0, help="cores of the mesh alone (default: all, shared)")
    parser.add_argument("--clients", type=int, default=max(1, available_cores() // 4), help="client processes")
    parser.add_argument("--lines", action="store_true", help="print each burst as a line of JSON, too")
    parser.add_argument("--out", type=Path, default=None, help="write a page with plots over time")
    arguments = parser.parse_args()
    if arguments.batch <= CONTROLS:
        parser.error(f"--batch: {arguments.batch} leave no requests beside {CONTROLS} control streams")
    return arguments


if __name__ == "__main__":
    asyncio.run(main(parsed()))
