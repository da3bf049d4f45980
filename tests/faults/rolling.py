"""`make rolling`: the processes of a mesh are restarted one after the other under streams. Exit code 1 for any error.

The restarts of each kind have a mesh of their own, and a line: the scheduler (SIGKILL, then a hang of 10 s) under plain
clients that begin 10 requests a second, gateways (SIGTERM) under 64 streams of our client, workers (SIGTERM) under 64
streams of plain clients. Every answer is compared with its reference.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tests.faults.cluster import Cluster, flowing, resume, steady, suspend
from tests.faults.history import History, percentile
from tests.mesh.harness import Process

RATE = 10.0
AWAY_S, HANG_S = 1.5, 10.0
HEAD = (
    "restarts of",
    "restarts",
    "streams",
    "failed",
    "repeated",
    "wrong",
    "moved",
    "pause p50",
    "pause p99",
    "seconds",
)


@contextlib.asynccontextmanager
async def loaded(cluster: Cluster, history: History, streams: int, *, resumes: bool) -> AsyncIterator[None]:
    """Keeps this number of streams running while the block runs, and waits for their ends."""
    stopped = False
    client = cluster.client()

    async def follow(number: int) -> None:
        dice, stub = random.Random(number), cluster.plain(number % len(cluster.gateways))
        while not stopped:
            seed, tokens = dice.randrange(1 << 40), 40 + dice.randrange(100)
            if resumes:
                await cluster.send_resumable(history, client, seed, tokens)
            else:
                await cluster.send(history, stub, seed, tokens)

    tasks = [asyncio.create_task(follow(number)) for number in range(streams)]
    try:
        async with client:
            await flowing(history.streams, 0)
            yield
            stopped = True
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def restart(process: Process, how: signal.Signals, exits: int) -> None:
    """Ends a process and starts it again. Asserts how it ended."""
    code = await asyncio.to_thread(process.kill, how)
    assert code == exits, f"{process.name} exited with {code}"
    process.start()
    await process.ready()


async def schedulers(folder: Path, restarts: int, streams: int, history: History) -> int:
    """SIGKILLs, each with some time without a scheduler, and one hang."""
    async with (
        Cluster(folder, workers=2, gateways=2) as cluster,
        steady(cluster, history, cluster.plain(), RATE),
        steady(cluster, history, cluster.plain(1), RATE),
    ):
        await asyncio.sleep(1.0)
        for _ in range(restarts):
            assert cluster.scheduler.kill() == -signal.SIGKILL
            await asyncio.sleep(AWAY_S)
            cluster.scheduler.start()
            await cluster.scheduler.ready()
            await asyncio.sleep(1.0)
        suspend(cluster.scheduler)
        await asyncio.sleep(HANG_S)
        resume(cluster.scheduler)
        await asyncio.sleep(1.0)
    return restarts


async def gateways(folder: Path, restarts: int, streams: int, history: History) -> int:
    """Each gateway in turn drains and starts again."""
    async with (
        Cluster(folder, workers=2, gateways=2, step_ms=20.0) as cluster,
        loaded(cluster, history, streams, resumes=True),
    ):
        for number in range(restarts):
            await restart(cluster.gateways[number % 2], signal.SIGTERM, 0)
    return restarts


async def workers(folder: Path, restarts: int, streams: int, history: History) -> int:
    """Each worker in turn drains and starts again."""
    async with (
        Cluster(folder, workers=3, step_ms=20.0) as cluster,
        loaded(cluster, history, streams, resumes=False),
    ):
        for number in range(restarts):
            await restart(cluster.workers[number % 3], signal.SIGTERM, 0)
            await cluster.listed(3)
    return restarts


Rolling = Callable[[Path, int, int, History], Awaitable[int]]
KINDS: dict[str, tuple[Rolling, int]] = {
    "scheduler": (schedulers, 20),
    "gateways": (gateways, 100),
    "workers": (workers, 20),
}


async def main(options: argparse.Namespace) -> int:
    """Prints a line for each kind. -> the exit code."""
    bad = 0
    print(_line(HEAD))
    for name in options.kinds:
        rolled, most = KINDS[name]
        history, began = History(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            restarts = await rolled(Path(folder), options.restarts or most, options.streams, history)
        seconds = time.monotonic() - began
        summary, pauses = history.summary(), [stream.pause_s() for stream in history.streams]
        failed = summary["sent"] - summary["completed"]
        cells = (restarts, summary["sent"], failed, *(summary[each] for each in ("repeated", "wrong", "moved")))
        shares = (f"{percentile(pauses, share):.2f} s" for share in (0.5, 0.99))
        print(_line((name, *map(str, cells), *shares, f"{seconds:.0f}")), flush=True)
        kept = history.keep_wrong(options.out, {"row": f"rolling-{name}"})
        reasons = Counter(f"{stream.code}/{stream.reason}" for stream in history.streams if stream.code)
        bad += failed + len(kept)
        if bad:
            print("   ", dict(reasons), *kept[:3])
    return 1 if bad else 0


def _line(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"{first:<12}" + "".join(f"{cell:>11}" for cell in others)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="make rolling", description=__doc__)
    parser.add_argument("--restarts", type=int, default=0, help="of each kind; 0: 20, 100 of gateways")
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS), help="what is restarted")
    parser.add_argument("--out", type=Path, default=Path(".weft/rolling"), help="folder of wrong streams")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse(sys.argv[1:]))))
