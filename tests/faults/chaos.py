"""`make chaos`: every row of rows.py with many seeds, one line each, and a report. Exit code 1 if a promise breaks.

Beside each run a second mesh that nothing disturbs answers control streams. A run whose own control paused for longer
than 50 ms says more about the machine than about the promise: it is repeated, and counted only after three attempts.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from report import html, machine, plot
from tests.faults.cluster import Cluster, flowing
from tests.faults.history import History, percentile
from tests.faults.rows import ROWS, STEP_MS, Row, Run, check_row, run_row

CONTROL_STREAMS = 2
MOST_CONTROL_PAUSE_S = 0.05 + STEP_MS / 1e3
"""Longest pause between two tokens of a control stream, of which a step is no pause."""
ATTEMPTS = 3


@dataclass
class Result:
    """All runs of one row."""

    row: Row
    seeds: int = 0
    in_flight: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    disturbed: int = 0
    """Runs that were repeated because the control paused."""
    problems: list[str] = field(default_factory=list)
    proof: str = ""

    def add(self, run: Run, seed: int) -> None:
        """Adds a run that counts."""
        self.seeds += 1
        self.in_flight += run.in_flight
        for name, count in run.history.summary().items():
            self.totals[name] = self.totals.get(name, 0) + count
        self.pauses += run.pauses()
        self.proof = run.proof
        self.problems += [f"seed {seed}: {problem}" for problem in check_row(self.row, run)]

    @property
    def verdict(self) -> str:
        """What a promise has come to: holds, slow (only its pause is too long), or broken."""
        if self.problems or not self.seeds:
            return "broken"
        return "slow" if percentile(self.pauses, 0.99) > self.row.most_pause_s else "holds"

    def cells(self) -> list[str]:
        """The line of this row."""
        lost = self.totals.get("sent", 0) - self.totals.get("completed", 0)
        counts = (self.in_flight, lost, self.totals.get("repeated", 0), self.totals.get("wrong", 0))
        return [
            self.row.name,
            str(self.seeds),
            *map(str, counts),
            str(self.totals.get("moved", 0)),
            f"{percentile(self.pauses, 0.5):.2f} s",
            f"{percentile(self.pauses, 0.99):.2f} s",
            f"{percentile(self.control, 0.99) * 1e3:.0f} ms",
            str(self.disturbed),
            self.verdict,
        ]


HEAD = ["row", "seeds", "in flight", "lost", "repeated", "wrong", "moved", "pause p50", "pause p99", "control p99",
        "disturbed", "verdict"]  # fmt: skip


async def run_once(row: Row, seed: int, options: argparse.Namespace, control: Cluster) -> tuple[Run, list[float]]:
    """-> one run on a mesh of its own, and the pauses of the control streams meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder), workers=row.workers, gateways=row.gateways, step_ms=STEP_MS, worker_env=dict(row.env)
        )
        async with cluster:
            run = Run(cluster, random.Random(seed), options.streams, options.cut_s)
            calm, stub = History(), control.plain()
            tokens = int((options.cut_s + 30) * 1e3 / STEP_MS)
            tasks = [control.send(calm, stub, seed + number, tokens) for number in range(CONTROL_STREAMS)]
            try:
                await flowing(calm.streams, CONTROL_STREAMS)
                await run_row(row, run)
            except (AssertionError, TimeoutError) as error:
                run.history.keep_wrong(options.out, {"row": _file_name(row), "seed": seed})
                raise AssertionError(f"{type(error).__name__}: {error}") from error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            run.history.keep_wrong(options.out, {"row": _file_name(row), "seed": seed})
            return run, [stream.pause_s(run.began) for stream in calm.streams]


async def run_seeds(row: Row, options: argparse.Namespace, control: Cluster) -> Result:
    """All seeds of one row."""
    result = Result(row)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                run, pauses = await run_once(row, seed, options, control)
            except AssertionError as error:
                result.problems.append(f"seed {seed}: {str(error)[:300]}")
                break
            calm = max(pauses, default=0.0) <= MOST_CONTROL_PAUSE_S
            if calm or attempt == ATTEMPTS or check_row(row, run):
                result.control += pauses
                result.add(run, seed)
                break
            result.disturbed += 1
    return result


async def main(options: argparse.Namespace) -> int:
    """Runs the rows, prints a line for each, writes the report. -> the exit code."""
    rows = [row for row in ROWS if any(name in row.name for name in options.rows or [""])]
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    print(_line(HEAD))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster(Path(folder), workers=1, step_ms=STEP_MS) as control:
            for row in rows:
                results.append(await run_seeds(row, options, control))
                print(_line(results[-1].cells()), flush=True)
                for problem in results[-1].problems:
                    print(f"    {problem}", flush=True)
    page = options.out / "chaos.html"
    page.write_text(document(results, time.monotonic() - began))
    print(f"{page}; wrong streams are kept beside it")
    return 1 if any(result.verdict == "broken" for result in results) else 0


def document(results: Iterable[Result], seconds: float) -> str:
    """The report: the table, and for each row how long its streams paused."""
    results = list(results)
    broken = sum(result.verdict == "broken" for result in results)
    slow = sum(result.verdict == "slow" for result in results)
    rows = [[*result.cells()[:-1], _mark(result.verdict)] for result in results]
    plots = [
        html.card(
            result.row.name,
            plot.lines(
                [plot.Line("streams", _cumulated(result.pauses)), plot.Line("control", _cumulated(result.control))],
                plot.Axis("longest pause of a stream, s"),
                plot.Axis("share of streams"),
            ),
            said=f"{result.row.promise}. {result.proof}",
        )
        for result in results
    ]
    tiles = [
        ("rows", str(len(results)), "promises"),
        ("broken", f"{'!' if broken else '+'}{broken}", "broken"),
        ("slow", f"{'!' if slow else '+'}{slow}", "pauses longer than promised"),
        ("streams", str(sum(result.totals.get("sent", 0) for result in results)), "streams"),
    ]
    body = [html.tiles(tiles), html.card("Promises", html.table(HEAD, rows), wide=True), html.cards(plots)]
    problems = [[result.row.name, problem] for result in results for problem in result.problems]
    if problems:
        body.append(html.card("Broken promises", html.table(["row", "problem"], problems), wide=True))
    data = {"rows": [dict(zip(HEAD, result.cells(), strict=True)) for result in results]}
    return html.document("Weft under faults", f"{seconds:.0f} s on {json.dumps(machine.describe())}", body, data)


def _cumulated(values: list[float]) -> list[plot.Point]:
    ordered = sorted(values)
    return [(value, (number + 1) / len(ordered)) for number, value in enumerate(ordered)]


def _mark(verdict: str) -> str:
    return f"{'+' if verdict == 'holds' else '!'}{verdict}"


def _file_name(row: Row) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in row.name)


def _line(cells: list[str]) -> str:
    first, *others = cells
    return f"{first:<44}" + "".join(f"{cell:>12}" for cell in others)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--first-seed", type=int, default=1, help="number of the first seed, to replay one")
    parser.add_argument("--streams", type=int, default=64, help="streams of each run")
    parser.add_argument("--cut-s", type=float, default=6.0, help="seconds that a cut or a suspension lasts")
    parser.add_argument("--rows", nargs="*", help="parts of the names of the rows to run; all without it")
    parser.add_argument("--out", type=Path, default=Path(".weft/chaos"), help="folder of the report and wrong streams")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse(sys.argv[1:]))))
