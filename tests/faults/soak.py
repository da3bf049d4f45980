"""`make soak`: one mesh under load for a long time, with a fault at intervals. Exit code 1 if any answer is not whole.

Every answer is compared with its reference. Memory and open descriptors of each process are sampled; at the end no
worker may hold a KV block for a job.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from report import html, plot
from tests.faults.cluster import Cluster, resume, suspend
from tests.faults.history import History, Stream, percentile
from tests.mesh.harness import Process, Stub

SAMPLE_S = 5.0
HOLD_S = 4.0
"""Seconds that a cut or a suspension lasts."""
Samples = dict[str, list[tuple[float, float, int]]]
"""By process: time, resident memory in MiB, open descriptors."""


async def kill_worker(cluster: Cluster, dice: random.Random) -> str:
    """SIGKILL, and the worker starts again."""
    worker = dice.choice(cluster.workers)
    worker.kill()
    worker.start()
    return f"SIGKILL {worker.name}"


async def kill_scheduler(cluster: Cluster, dice: random.Random) -> str:
    """SIGKILL, and the scheduler starts again."""
    cluster.scheduler.kill()
    cluster.scheduler.start()
    return "SIGKILL scheduler"


async def suspend_any(cluster: Cluster, dice: random.Random) -> str:
    """SIGSTOP to a worker or to the scheduler, then SIGCONT."""
    process: Process = dice.choice([*cluster.workers, cluster.scheduler])
    suspend(process)
    await asyncio.sleep(HOLD_S)
    resume(process)
    return f"SIGSTOP {process.name}"


async def cut_any(cluster: Cluster, dice: random.Random) -> str:
    """Holds or refuses one link."""
    worker = dice.choice(cluster.workers)
    ends = [(worker.name, "scheduler"), (cluster.gateways[0].name, "scheduler"), ("gateway", worker.name)]
    client_name, server_name = dice.choice(ends)
    proxy = cluster.link(client_name, server_name)
    if dice.random() < 0.5:
        proxy.cut()
    else:
        proxy.refuse()
    await asyncio.sleep(HOLD_S)
    await proxy.heal()
    return f"cut {client_name} | {server_name}"


FAULTS: list[Callable[[Cluster, random.Random], Awaitable[str]]] = [kill_worker, kill_scheduler, suspend_any, cut_any]


async def client(
    cluster: Cluster, history: History, stub: Stub, dice: random.Random, until: float, numbers: dict[str, int]
) -> None:
    """Sends one request after another. Whole answers are counted and dropped, all others are kept."""
    while time.monotonic() < until:
        own = History()
        stream: Stream = await cluster.send(own, stub, dice.randrange(1 << 40), 20 + dice.randrange(300))
        numbers["sent"] += 1
        numbers[stream.outcome] = numbers.get(stream.outcome, 0) + 1
        numbers["moved"] += stream.moved
        history.pauses.append(stream.pause_s())
        if stream.outcome != "completed" or stream.problems():
            history.streams.append(stream)


async def sample(cluster: Cluster, samples: Samples, began: float) -> None:
    """Samples every process until cancelled."""
    while True:
        for process in cluster.processes:
            if process.popen is None or process.popen.poll() is not None:
                continue
            used = _usage(process.pid)
            if used is not None:
                samples.setdefault(f"{process.name} {process.pid}", []).append((time.monotonic() - began, *used))
        await asyncio.sleep(SAMPLE_S)


def _usage(pid: int) -> tuple[float, int] | None:
    """Resident memory in MiB and open descriptors of a process; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages / 256, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None


async def main(options: argparse.Namespace) -> int:
    """Runs the soak, prints its result, writes the report. -> the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    dice, history, samples = random.Random(options.seed), History(), Samples()
    numbers = {"sent": 0, "moved": 0}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster(Path(folder), workers=3, gateways=2) as cluster:
            began = time.monotonic()
            until = began + options.seconds
            stubs = [cluster.plain(number % 2) for number in range(options.clients)]
            clients = [
                asyncio.create_task(client(cluster, history, stub, random.Random(number), until, numbers))
                for number, stub in enumerate(stubs)
            ]
            sampling = asyncio.create_task(sample(cluster, samples, began))
            while time.monotonic() + options.every < until:
                await asyncio.sleep(options.every)
                faults.append(await dice.choice(FAULTS)(cluster, dice))
                print(f"{time.monotonic() - began:7.0f} s  {faults[-1]:<32} {numbers}", flush=True)
            await asyncio.gather(*clients)
            sampling.cancel()
            await cluster.restored()
            held = await cluster.blocks_in_use()
    kept = history.keep_wrong(options.out, {"row": "soak", "seed": options.seed})
    wrong = sum(bool(stream.problems()) for stream in history.streams)
    bad = wrong or held or numbers.get("failed", 0)
    figures = {**numbers, "wrong": wrong, "blocks held": held, "faults": len(faults)}
    pauses = {"pause p50 s": percentile(history.pauses, 0.5), "pause p99 s": percentile(history.pauses, 0.99)}
    print(figures, {name: round(value, 3) for name, value in pauses.items()}, *kept)
    (options.out / "soak.html").write_text(document(figures, pauses, samples))
    return 1 if bad else 0


def document(figures: dict[str, int], pauses: dict[str, float], samples: Samples) -> str:
    """The report: counts, memory and descriptors over time, the slope of the memory of each process."""
    lasting = {name: values for name, values in samples.items() if len(values) > 1}
    memory = [plot.Line(name, [(at, mib) for at, mib, _ in values]) for name, values in lasting.items()]
    files = [plot.Line(name, [(at, count) for at, _, count in values]) for name, values in lasting.items()]
    slopes = [[name, f"{slope([(at, mib) for at, mib, _ in values]) * 3600:.1f}"] for name, values in lasting.items()]
    tiles = [(name, str(value), name) for name, value in figures.items()]
    tiles += [(name, f"{value:.2f}", name) for name, value in pauses.items()]
    seconds = plot.Axis("seconds")
    body = [
        html.tiles(tiles),
        html.cards(
            [
                html.card("Memory", plot.lines(memory, seconds, plot.Axis("MiB"))),
                html.card("Descriptors", plot.lines(files, seconds, plot.Axis("open descriptors"))),
                html.card("Slope of the memory", html.table(["process", "MiB per hour"], slopes)),
            ]
        ),
    ]
    return html.document("Weft soak", f"{figures['faults']} faults", body, {**figures, **pauses})


def slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line through the second half of the points with the least squared error."""
    points = points[len(points) // 2 :]
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long clients send requests")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--clients", type=int, default=32, help="clients, each with one request at a time")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults")
    parser.add_argument("--out", type=Path, default=Path(".weft/soak"), help="folder of the report and wrong streams")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse(sys.argv[1:]))))
