"""`make chaos`: every row of rows.py with many seeds, one line each, and a report. Exit code 1 if a promise breaks.

One mesh carries the seeds of a row one after the other; after each it is mended, and must hold what it held before.
Several lanes do so at a time, each in a process of its own. In each lane a second mesh, which nothing disturbs, answers
control streams. A run whose own control paused for longer than 50 ms says more about the machine than about the
promise: it is repeated. If it is never calm it does not count, unless it broke the promise. The results are kept beside
the report; `--resume` adds to them what is missing, such as the seeds that were not calm.
"""

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.queues
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from report import html, machine, plot
from tests import ports
from tests.faults.cluster import Cluster, flowing
from tests.faults.footprint import Baseline
from tests.faults.history import History, percentile
from tests.faults.rows import BY_NAME, ROWS, STEP_MS, Row, Run, check_row, run_row

CONTROL_STREAMS = 2
MOST_CONTROL_PAUSE_S = 0.05 + STEP_MS / 1e3
"""Longest pause between two tokens of a control stream, of which a step is no pause."""
ATTEMPTS = 3
SEEDS_OF_A_MESH = 10
RESULTS = "results.json"


@dataclass
class Result:
    """All runs of one row, or a part of them."""

    name: str
    asked: int = 0
    """Runs that the promise needs."""
    seeds: list[int] = field(default_factory=list)
    """Those that count."""
    in_flight: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    disturbed: int = 0
    """Runs that do not count because the control paused."""
    problems: list[str] = field(default_factory=list)
    proof: str = ""

    @property
    def row(self) -> Row:
        """The promise."""
        return BY_NAME[self.name]

    def merge(self, other: "Result") -> None:
        """Adds another part of this row."""
        self.seeds += other.seeds
        self.in_flight += other.in_flight
        for name, count in other.totals.items():
            self.totals[name] = self.totals.get(name, 0) + count
        self.pauses += other.pauses
        self.control += other.control
        self.disturbed += other.disturbed
        self.problems += other.problems
        self.proof = other.proof or self.proof

    def add(self, run: Run, seed: int) -> None:
        """Adds a run that counts."""
        self.seeds.append(seed)
        self.in_flight += run.in_flight
        for name, count in run.history.summary().items():
            self.totals[name] = self.totals.get(name, 0) + count
        self.pauses += run.pauses()
        self.proof = run.proof
        self.problems += [f"seed {seed}: {problem}" for problem in check_row(self.row, run)]

    @property
    def verdict(self) -> str:
        """What a promise has come to: holds, slow (only its pause is too long), disturbed (too few runs were calm), or
        broken."""
        if self.problems:
            return "broken"
        if percentile(self.pauses, 0.99) > self.row.most_pause_s:
            return "slow"
        return "holds" if len(self.seeds) >= self.asked else "disturbed"

    def cells(self) -> list[str]:
        """The line of this row."""
        lost = self.totals.get("sent", 0) - self.totals.get("completed", 0)
        counts = (self.in_flight, lost, self.totals.get("repeated", 0), self.totals.get("wrong", 0))
        return [
            self.name,
            str(len(self.seeds)),
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


async def run_once(
    row: Row, seed: int, options: argparse.Namespace, mesh: tuple[Cluster, Baseline], control: Cluster
) -> tuple[Run, list[float]]:
    """-> one run, and the pauses of the control streams meanwhile. Raises AssertionError."""
    run = row.run(*mesh, seed, options.streams)
    calm, stub = History(), control.plain()
    tasks = [control.send(calm, stub, seed + number, int(60e3 / STEP_MS)) for number in range(CONTROL_STREAMS)]
    try:
        await flowing(calm.streams, CONTROL_STREAMS)
        await run_row(row, run)
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    finally:
        run.history.keep_wrong(options.out, {"row": _file_name(row), "seed": seed})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await control.hang_up()
    return run, [stream.pause_s(run.began) for stream in calm.streams]


async def run_seed(
    result: Result, seed: int, options: argparse.Namespace, mesh: tuple[Cluster, Baseline], control: Cluster
) -> None:
    """One seed, repeated while its control is disturbed. Raises AssertionError if the mesh must not be used again."""
    for _ in range(ATTEMPTS):
        run, pauses = await run_once(result.row, seed, options, mesh, control)
        if max(pauses, default=0.0) <= MOST_CONTROL_PAUSE_S or check_row(result.row, run):
            result.control += pauses
            result.add(run, seed)
            return
        result.disturbed += 1


async def run_seeds(name: str, seeds: Sequence[int], options: argparse.Namespace) -> Result:
    """Some seeds of a row on one mesh; on another one after a broken promise."""
    result, left = Result(name), list(seeds)
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster(Path(folder, "control"), workers=1, step_ms=STEP_MS) as control:
            while left:
                seed = left[0]
                try:
                    async with result.row.mesh(Path(folder, f"mesh-{len(left)}")) as cluster:
                        await cluster.restored()
                        baseline = Baseline()
                        await baseline.leaks(cluster.measured)
                        while left:
                            seed = left.pop(0)
                            began = time.monotonic()
                            await run_seed(result, seed, options, (cluster, baseline), control)
                            if options.verbose:
                                print(f"    {name}, seed {seed}: {time.monotonic() - began:.1f} s, {result.proof}")
                except AssertionError as error:
                    result.problems.append(f"seed {seed}: {str(error)[:400]}")
                    left = [each for each in left if each != seed]
    return result


def _begin_lane(numbers: "multiprocessing.queues.SimpleQueue[int]", lanes: int) -> None:
    """The meshes of a lane have ports of their own."""
    ports.draw_from(numbers.get(), lanes)


def run_part(name: str, seeds: Sequence[int], options: argparse.Namespace) -> Result:
    """The work of a lane."""
    return asyncio.run(run_seeds(name, seeds, options))


def parts_of(result: Result, options: argparse.Namespace) -> list[Sequence[int]]:
    """The seeds of a row that are missing, in parts that one mesh carries."""
    wanted = range(options.first_seed, options.first_seed + result.asked)
    left = [seed for seed in wanted if seed not in result.seeds]
    return [left[first : first + SEEDS_OF_A_MESH] for first in range(0, len(left), SEEDS_OF_A_MESH)]


def load(options: argparse.Namespace) -> dict[str, Result]:
    """The results of the rows that are to be run: those of former runs with `--resume`, or empty ones."""
    kept = _kept(options)
    rows = [row for row in ROWS if any(name in row.name for name in options.rows or [""])]
    results = {row.name: Result(**kept.get(row.name, {"name": row.name})) for row in rows}
    for row in rows:
        results[row.name].asked = options.seeds or row.seeds
    return results


def save(results: Iterable[Result], seconds: float, options: argparse.Namespace) -> Path:
    """Writes results and report. -> the report."""
    kept = {**_kept(options), **{result.name: asdict(result) for result in results}}
    Path(options.out, RESULTS).write_text(json.dumps(kept))
    known = [Result(**kept[row.name]) for row in ROWS if row.name in kept]
    page = Path(options.out, "chaos.html")
    page.write_text(document([result for result in known if result.seeds or result.problems], seconds))
    return page


def _kept(options: argparse.Namespace) -> dict[str, Any]:
    file = Path(options.out, RESULTS)
    return dict(json.loads(file.read_text())) if options.resume and file.exists() else {}


def main(options: argparse.Namespace) -> int:
    """Runs the rows, prints a line for each, writes the report. -> the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    results, began = load(options), time.monotonic()
    print(_line(HEAD))
    spawned = multiprocessing.get_context("spawn")
    numbers = spawned.SimpleQueue()
    for number in range(options.lanes):
        numbers.put(number)
    with ProcessPoolExecutor(options.lanes, spawned, _begin_lane, (numbers, options.lanes)) as lanes:
        parts = {name: parts_of(result, options) for name, result in results.items()}
        running = [lanes.submit(run_part, name, seeds, options) for name, each in parts.items() for seeds in each]
        missing = {name: len(each) for name, each in parts.items()}
        for part in as_completed(running):
            result = results[part.result().name]
            result.merge(part.result())
            missing[result.name] -= 1
            save(results.values(), time.monotonic() - began, options)
            if not missing[result.name]:
                print(_line(result.cells()), *result.problems, sep="\n    ", flush=True)
    print(f"{save(results.values(), time.monotonic() - began, options)}; wrong streams are kept beside it")
    return 1 if any(result.verdict == "broken" for result in results.values()) else 0


def document(results: Iterable[Result], seconds: float) -> str:
    """The report: the table, and for each row how long its streams paused."""
    results = list(results)
    broken = sum(result.verdict == "broken" for result in results)
    slow = sum(result.verdict == "slow" for result in results)
    rows = [[*result.cells()[:-1], _mark(result.verdict)] for result in results]
    plots = [
        html.card(
            result.name,
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
    problems = [[result.name, problem] for result in results for problem in result.problems]
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
    return f"{first:<46}" + "".join(f"{cell:>12}" for cell in others)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row; 0: as many as its promise needs")
    parser.add_argument("--first-seed", type=int, default=1, help="number of the first seed, to replay one")
    parser.add_argument("--streams", type=int, default=64, help="streams of each run")
    parser.add_argument("--resume", action="store_true", help="add to the results of former runs what is missing")
    parser.add_argument("--lanes", type=int, default=1, help="meshes at the same time")
    parser.add_argument("--verbose", action="store_true", help="print a line for each seed")
    parser.add_argument("--rows", nargs="*", help="parts of the names of the rows to run; all without it")
    parser.add_argument("--out", type=Path, default=Path(".weft/chaos"), help="folder of the report and wrong streams")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
