"""The rows of `make chaos`: one fault each, the promise that it must not break, and the proof that it happened."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.faults.cluster import Cluster, flowing, resume, suspend
from tests.faults.footprint import footprint, settled
from tests.faults.history import History, Stream
from tests.faults.proxy import BOTH, Proxy, Way
from tests.security.hostile_texts import attacked

STEP_MS = 20.0


@dataclass
class Run:
    """One run of a row: its mesh, its dice, and what it recorded."""

    cluster: Cluster
    dice: random.Random
    streams: int
    cut_s: float
    history: History = field(default_factory=History)
    began: float = 0.0
    """When the fault began, on `time.monotonic`."""
    in_flight: int = 0
    """Streams that had tokens and were not complete when the fault began."""
    proof: str = ""

    def begin(self) -> None:
        """Notes the beginning of the fault."""
        self.began = time.monotonic()
        self.in_flight = sum(stream.flows for stream in self.history.streams)
        assert self.in_flight, "no stream was in flight when the fault began"

    def pauses(self) -> list[float]:
        """The longest pause of each stream that was in flight."""
        return [s.pause_s(self.began) for s in self.history.streams if s.times and s.times[0] < self.began]


Fault = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """A promise and the fault that tests it."""

    name: str
    promise: str
    fault: Fault
    workers: int = 2
    gateways: int = 1
    moves: bool | None = None
    """Whether streams must move to another worker (True), must not (False), or may (None)."""
    most_pause_s: float = float("inf")
    """The longest pause that the promise allows at the 99th percentile, on a quiet machine."""
    env: dict[str, str] = field(default_factory=dict)
    """Settings of the workers."""
    resumes: bool = False
    """The streams are those of our own client, which resumes them at another gateway."""


async def run_row(row: Row, run: Run) -> None:
    """Starts the streams, waits until all of them flow, breaks something, and waits for every answer.

    Raises AssertionError if the fault did not happen, if an answer is not whole, or if a process that was not restarted
    holds more descriptors or tasks afterwards."""
    cluster = run.cluster
    watched = {process.pid: process for process in cluster.processes if "WEFT_METRICS_PORT" in process.env}
    before = {pid: await footprint(process) for pid, process in watched.items()}
    tokens = int((run.cut_s + 2.5) * 1e3 / STEP_MS)
    stubs = [cluster.plain(number) for number in range(len(cluster.gateways))]
    seeds = [run.dice.randrange(1 << 40) for _ in range(run.streams)]
    async with cluster.client() as client:
        tasks = []
        for number, seed in enumerate(seeds):
            length = tokens + run.dice.randrange(40)
            if row.resumes:
                tasks.append(cluster.send_resumable(run.history, client, seed, length))
            else:
                tasks.append(cluster.send(run.history, stubs[number % len(stubs)], seed, length))
        await flowing(run.history.streams, run.streams, position=1 + run.dice.randrange(20))
        await row.fault(run)
        assert run.proof, f"{row.name}: nothing proves that the fault happened"
        await asyncio.gather(*tasks)
    connections = len(stubs) + 1 + 3 * len(cluster.workers)  # Links that were opened anew have tasks of their own.
    for pid, process in watched.items():
        if process.pid == pid and process.popen is not None and process.popen.poll() is None:
            assert not (leak := await settled(process, before[pid], connections)), leak


def check_row(row: Row, run: Run) -> list[str]:
    """Which parts of the promise do not hold; the pause is judged by `make chaos`, which knows its control."""
    summary, problems = run.history.summary(), []
    if summary["completed"] != summary["sent"]:
        reasons = sorted({f"{stream.code}/{stream.reason}" for stream in run.history.streams if stream.code})
        problems.append(f"{summary['sent'] - summary['completed']} streams were not completed: {', '.join(reasons)}")
    problems += [f"{stream.name}: {problem}" for stream in run.history.wrong() for problem in stream.problems()]
    if row.moves is True and not summary["moved"]:
        problems.append("no stream moved")
    if row.moves is False and summary["moved"]:
        problems.append(f"{summary['moved']} streams moved although their tokens flowed")
    return problems


# ---- cuts ----


def cut(client: str, server: str, ways: frozenset[Way] = BOTH) -> Fault:
    """Holds the bytes of a link for some seconds."""

    async def fault(run: Run) -> None:
        proxy = run.cluster.link(client, server)
        run.begin()
        proxy.cut(ways)
        await _hold(run, proxy)

    return fault


def refuse(client: str, server: str) -> Fault:
    """Resets a link, and refuses its connections for some seconds."""

    async def fault(run: Run) -> None:
        proxy = run.cluster.link(client, server)
        run.begin()
        proxy.refuse()
        await _hold(run, proxy)

    return fault


def late(client: str, server: str, seconds: float) -> Fault:
    """Delays a link for some seconds."""

    async def fault(run: Run) -> None:
        proxy = run.cluster.link(client, server)
        run.begin()
        proxy.delay(seconds)
        await _hold(run, proxy)

    return fault


async def _hold(run: Run, proxy: Proxy) -> None:
    await asyncio.sleep(run.cut_s)
    counts = proxy.counts
    assert counts.held or counts.refused or counts.delayed, "the proxy held, refused and delayed nothing"
    run.proof = f"{counts.held} bytes held, {counts.delayed} delayed, {counts.refused} connections refused"
    await proxy.heal()


# ---- processes ----


async def kill_worker(run: Run) -> None:
    """SIGKILL to a worker."""
    run.begin()
    run.proof = f"exit {run.cluster.workers[0].kill()}"
    assert run.proof == "exit -9"


async def suspend_worker(run: Run) -> None:
    """SIGSTOP to a worker for longer than a gateway waits, then SIGCONT."""
    run.begin()
    suspend(run.cluster.workers[0])
    run.proof = "state T"
    await asyncio.sleep(run.cut_s)
    resume(run.cluster.workers[0])


async def suspend_worker_briefly(run: Run) -> None:
    """SIGSTOP to a worker for half a second."""
    run.begin()
    suspend(run.cluster.workers[0])
    run.proof = "state T"
    await asyncio.sleep(0.5)
    resume(run.cluster.workers[0])


async def kill_gateway(run: Run) -> None:
    """SIGKILL to a gateway, and a new one after some seconds."""
    run.begin()
    run.proof = f"exit {run.cluster.gateways[0].kill()}"
    assert run.proof == "exit -9"
    await asyncio.sleep(run.cut_s / 2)
    run.cluster.gateways[0].start()


async def end_gateway(run: Run) -> None:
    """SIGTERM to a gateway, and a new one at once."""
    run.begin()
    run.proof = f"exit {await asyncio.to_thread(run.cluster.gateways[0].kill, signal.SIGTERM)}"
    assert run.proof == "exit 0"
    run.cluster.gateways[0].start()


async def kill_scheduler(run: Run) -> None:
    """SIGKILL to the scheduler, and a new one after some seconds."""
    run.begin()
    run.proof = f"exit {run.cluster.scheduler.kill()}"
    await asyncio.sleep(run.cut_s)
    run.cluster.scheduler.start()


async def suspend_scheduler(run: Run) -> None:
    """SIGSTOP to the scheduler for some seconds."""
    run.begin()
    suspend(run.cluster.scheduler)
    run.proof = "state T"
    await asyncio.sleep(run.cut_s)
    resume(run.cluster.scheduler)


# ---- clients ----


async def hostile_texts(run: Run) -> None:
    """16 clients that send texts of 1 MiB, which do not fit, as fast as they are refused."""
    run.begin()
    async with attacked(run.cluster.gateways[0].address) as refusals:
        await asyncio.sleep(run.cut_s)
    run.proof = f"{len(refusals)} texts refused"
    assert len(refusals) > 1
    assert set(map(bytes.strip, refusals)) == {b"INVALID_ARGUMENT"}


def sent_after(streams: list[Stream], at: float) -> list[Stream]:
    """The streams that were sent after this time."""
    return [stream for stream in streams if stream.sent_at > at]


_FLOWS = "a stream whose tokens flow is neither ended nor moved"
_REQUESTS, _ANSWERS = frozenset({Way.REQUESTS}), frozenset({Way.ANSWERS})


def _control_plane_rows() -> list[Row]:
    rows = []
    for client, name in (("worker-0", "worker"), ("gateway-0", "gateway")):
        faults = {
            "both ways": cut(client, "scheduler"),
            "requests": cut(client, "scheduler", _REQUESTS),
            "answers": cut(client, "scheduler", _ANSWERS),
            "refused": refuse(client, "scheduler"),
            "3 s late": late(client, "scheduler", 3.0),
        }
        for how, fault in faults.items():
            for workers in (1, 2):
                title = f"cut {name}|scheduler, {how}, {workers} worker{'s' * (workers > 1)}"
                rows.append(Row(title, _FLOWS, fault, workers=workers, moves=False, most_pause_s=0.25))
    return rows


ROWS: list[Row] = [
    *_control_plane_rows(),
    Row("cut gateway|worker, both ways", "streams move", cut("gateway", "worker-0"), moves=True, most_pause_s=3.0),
    Row("cut gateway|worker, both ways, 1 worker", "streams wait", cut("gateway", "worker-0"), workers=1),
    Row("cut gateway|worker, answers", "streams move", cut("gateway", "worker-0", _ANSWERS), moves=True,
        most_pause_s=3.0),
    Row("cut gateway|worker, requests", _FLOWS, cut("gateway", "worker-0", _REQUESTS)),
    Row("cut gateway|worker, refused", "streams move", refuse("gateway", "worker-0"), moves=True, most_pause_s=0.5),
    Row("gateway|worker 0.1 s late", _FLOWS, late("gateway", "worker-0", 0.1), moves=False, most_pause_s=0.5),
    Row("gateway|worker 3 s late", "streams move", late("gateway", "worker-0", 3.0), most_pause_s=3.0),
    Row("gateway|worker 3 s late, 1 worker", "streams wait", late("gateway", "worker-0", 3.0), workers=1),
    Row("worker SIGKILL", "no token lost or repeated", kill_worker, workers=3, moves=True, most_pause_s=0.5),
    Row("worker SIGSTOP", "lost after max(2 s, 3 steps)", suspend_worker, workers=3, moves=True, most_pause_s=3.0),
    Row("worker SIGSTOP 0.5 s", "moves nothing", suspend_worker_briefly, moves=False, most_pause_s=0.9),
    Row("worker SIGSTOP, 1 worker", "streams wait", suspend_worker, workers=1),
    Row("scheduler SIGKILL", _FLOWS, kill_scheduler, moves=False, most_pause_s=0.25),
    Row("scheduler SIGSTOP", _FLOWS, suspend_scheduler, moves=False, most_pause_s=0.25),
    Row("gateway SIGKILL", "our client resumes", kill_gateway, gateways=2, resumes=True, most_pause_s=1.0),
    Row("gateway SIGTERM", "streams end where they are", end_gateway, gateways=2, resumes=True, most_pause_s=1.0),
    Row("16 clients with 1 MiB texts", _FLOWS, hostile_texts, workers=1, moves=False, most_pause_s=0.25),
]  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
