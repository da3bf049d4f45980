"""The rows of `make chaos`: one fault each, the promise that it must not break, and the proof that it happened."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from grpc import aio

from protos import inference_pb2 as api
from services.gateway.links.link_health import MigrationBudget
from tests.faults.cluster import Cluster, flowing, request_of, resume, steady, suspend
from tests.faults.footprint import Baseline
from tests.faults.history import History, Stream
from tests.faults.proxy import BOTH, Proxy, Way
from tests.security.hostile_texts import attacked

STEP_MS = 40.0
APART_S = MigrationBudget.WINDOW_S + 0.5
MANY, SOME = 100, 20
"""Seeds of the rows that matter most, and of the others."""


@dataclass
class Run:
    """One run of a row: its mesh, which other runs may have used before, its dice, and what it recorded."""

    cluster: Cluster
    baseline: Baseline
    """What the mesh holds at rest."""
    dice: random.Random
    streams: int
    hold_s: float
    """Seconds that the fault lasts if it does not end by itself."""
    history: History = field(default_factory=History)
    began: float = 0.0
    """When the fault began, on `time.monotonic`."""
    in_flight: int = 0
    """Streams that had tokens and were not complete when the fault began."""
    proof: str = ""
    waits: list[float] = field(default_factory=list)
    """Times to the first token of requests that were sent during the fault, if the promise is about these."""

    def begin(self) -> None:
        """Notes the beginning of the fault."""
        self.began = time.monotonic()
        self.in_flight = sum(stream.flows for stream in self.history.streams)
        assert self.in_flight, "no stream was in flight when the fault began"

    def pauses(self) -> list[float]:
        """The longest pause of each stream that was in flight, or the time to the first token of each new one."""
        return self.waits or [
            s.pause_s(self.began) for s in self.history.streams if s.times and s.times[0] < self.began
        ]


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
    hold_s: float = 3.5
    """Seconds that the fault lasts, if it does not end by itself; each run draws its own near this."""
    apart_s: float = 0.0
    """Seconds between the beginnings of two faults: a gateway gives up few silent workers in a while."""
    seeds: int = SOME
    """How many runs the promise needs."""

    def mesh(self, folder: Path) -> Cluster:
        """The mesh of this row, not yet started."""
        return Cluster(folder, workers=self.workers, gateways=self.gateways, step_ms=STEP_MS, worker_env=dict(self.env))

    def run(self, cluster: Cluster, baseline: Baseline, seed: int, streams: int) -> Run:
        """A run of this row."""
        dice = random.Random(seed)
        return Run(cluster, baseline, dice, streams, self.hold_s * dice.uniform(0.85, 1.3))


async def run_row(row: Row, run: Run) -> None:
    """Starts the streams, waits until all of them flow, breaks something, waits for every answer, and mends the mesh.

    Raises AssertionError if the fault did not happen, if a stream ended before it, if a worker holds a KV block
    afterwards, or a process that was not restarted holds more descriptors or tasks than before."""
    cluster = run.cluster
    tokens = int((run.hold_s + 1.0) * 1e3 / STEP_MS)
    stubs = [cluster.plain(number) for number in range(len(cluster.gateways))]
    async with cluster.client() as client:
        tasks = []
        for number in range(run.streams):
            seed, length = run.dice.randrange(1 << 40), tokens + run.dice.randrange(20)
            if row.resumes:
                tasks.append(cluster.send_resumable(run.history, client, seed, length))
            else:
                tasks.append(cluster.send(run.history, stubs[number % len(stubs)], seed, length))
        await flowing(run.history.streams, run.streams, position=1 + run.dice.randrange(10))
        await row.fault(run)
        assert run.proof, f"{row.name}: nothing proves that the fault happened"
        await asyncio.gather(*tasks)
    await cluster.restored()
    assert not (held := await cluster.blocks_in_use()), f"workers hold {held} KV blocks for no job"
    await asyncio.sleep(max(0.0, run.began + row.apart_s - time.monotonic()))
    assert not (leaks := await run.baseline.leaks(cluster.measured)), "; ".join(leaks)


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
    await asyncio.sleep(run.hold_s)
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


async def replace_worker(run: Run) -> None:
    """SIGKILL to a worker, and a new one at once, which loads first."""
    await kill_worker(run)
    run.cluster.workers[0].start()


async def suspend_worker(run: Run) -> None:
    """SIGSTOP to a worker for longer than a gateway waits, then SIGCONT."""
    run.begin()
    suspend(run.cluster.workers[0])
    run.proof = "state T"
    await asyncio.sleep(run.hold_s)
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
    await asyncio.sleep(run.hold_s)
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
    await asyncio.sleep(run.hold_s)
    run.cluster.scheduler.start()


async def suspend_scheduler(run: Run) -> None:
    """SIGSTOP to the scheduler for some seconds."""
    run.begin()
    suspend(run.cluster.scheduler)
    run.proof = "state T"
    await asyncio.sleep(run.hold_s)
    resume(run.cluster.scheduler)


async def starve(run: Run) -> None:
    """Suspends every process for most of the time, as a machine does that has no processor for them."""
    run.begin()
    stops, end = 0, time.monotonic() + run.hold_s
    while time.monotonic() < end:
        for process in run.cluster.processes:
            suspend(process)
            stops += 1
        await asyncio.sleep(run.dice.uniform(0.2, 0.6))
        for process in run.cluster.processes:
            resume(process)
        await asyncio.sleep(run.dice.uniform(0.02, 0.1))
    run.proof = f"{stops} times state T"


# ---- clients ----


def beside_requests(fault: Fault, rate: float = 10.0, after_s: float = 0.0) -> Fault:
    """A fault beside new requests, of which only those count that are sent `after_s` seconds or more after it began."""

    async def both(run: Run) -> None:
        fresh = History()
        async with steady(run.cluster, fresh, run.cluster.plain(), rate):
            await fault(run)
        run.history.streams += fresh.streams
        counted = sent_after(fresh.streams, run.began + after_s)
        assert counted, "no request was sent during the fault"
        run.waits = [stream.times[0] - stream.sent_at for stream in counted if stream.times]
        run.proof += f", {len(counted)} new requests"

    return both


async def unreachable(run: Run) -> None:
    """New requests while the gateway cannot reach a worker, once it may know."""
    await beside_requests(cut("gateway", "worker-0"), after_s=1.5)(run)


async def leave(run: Run) -> None:
    """300 clients that leave after their first token."""
    run.begin()
    stub = run.cluster.plain()
    calls = [stub.Generate(request_of(run.dice.randrange(1 << 40), 200)) for _ in range(300)]
    received = await asyncio.gather(*map(_first, calls))
    assert sum(received) >= 200, f"only {sum(received)} of 300 clients received a token"
    run.proof = f"{sum(received)} clients left"


async def _first(call: "aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse]") -> bool:
    """Leaves after the first token. -> whether there was one."""
    async for response in call:
        if response.delta.token_ids:
            call.cancel()
            return True
    return False


async def hostile_texts(run: Run) -> None:
    """16 clients that send texts of 1 MiB, which do not fit, as fast as they are refused."""
    run.begin()
    async with attacked(run.cluster.gateways[0].address) as refusals:
        await asyncio.sleep(run.hold_s)
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
                row = Row(
                    f"cut {name}|scheduler, {how}, {workers} worker{'s' * (workers > 1)}", _FLOWS, fault,
                    workers=workers, moves=False, most_pause_s=0.25,
                    hold_s=5.0 if "late" in how else 3.5, seeds=MANY if (how, workers) == ("both ways", 2) else SOME,
                )  # fmt: skip
                rows.append(row)
    return rows


def _link_rows() -> list[Row]:
    link = "gateway", "worker-0"
    return [
        Row(
            "cut gateway|worker, both ways",
            "streams move",
            cut(*link),
            moves=True,
            most_pause_s=3.0,
            apart_s=APART_S,
            seeds=MANY,
        ),
        Row("cut gateway|worker, both ways, 1 worker", "streams wait", cut(*link), workers=1),
        Row(
            "cut gateway|worker, answers",
            "streams move",
            cut(*link, _ANSWERS),
            moves=True,
            most_pause_s=3.0,
            apart_s=APART_S,
        ),
        Row("cut gateway|worker, requests", _FLOWS, cut(*link, _REQUESTS)),
        Row("cut gateway|worker, refused", "streams move", refuse(*link), moves=True, most_pause_s=0.5),
        Row("cut gateway|worker, new requests", "others take them, after 1.5 s", unreachable, most_pause_s=0.5),
        Row("gateway|worker 0.1 s late", _FLOWS, late(*link, 0.1), moves=False, most_pause_s=0.5, hold_s=2.0),
        Row("gateway|worker 3 s late", "streams move", late(*link, 3.0), most_pause_s=3.0, hold_s=5.0, apart_s=APART_S),
        Row("gateway|worker 3 s late, 1 worker", "streams wait", late(*link, 3.0), workers=1, hold_s=5.0),
    ]


ROWS: list[Row] = [
    *_control_plane_rows(),
    *_link_rows(),
    Row("worker SIGKILL", "no token lost or repeated", kill_worker, workers=3, moves=True, most_pause_s=0.5,
        hold_s=1.0, seeds=MANY),
    Row("last worker SIGKILL", "streams wait for the next one", replace_worker, workers=1, moves=True, hold_s=1.0),
    Row("worker SIGSTOP", "lost after max(2 s, 3 steps)", suspend_worker, workers=3, moves=True, most_pause_s=3.0,
        apart_s=APART_S, seeds=MANY),
    Row("worker SIGSTOP 0.5 s", "moves nothing", suspend_worker_briefly, moves=False, most_pause_s=0.9, hold_s=1.0),
    Row("worker SIGSTOP, 1 worker", "streams wait", suspend_worker, workers=1),
    Row("scheduler SIGKILL", _FLOWS, kill_scheduler, moves=False, most_pause_s=0.25, seeds=MANY),
    Row("scheduler SIGSTOP", _FLOWS, suspend_scheduler, moves=False, most_pause_s=0.25, seeds=MANY),
    Row("scheduler SIGKILL, new requests", "answered within 2 s", beside_requests(kill_scheduler), most_pause_s=2.0),
    Row("scheduler SIGSTOP, new requests", "answered within 2 s", beside_requests(suspend_scheduler), most_pause_s=2.0),
    Row("gateway SIGKILL", "our client resumes", kill_gateway, gateways=2, resumes=True, most_pause_s=1.0, hold_s=1.5,
        seeds=MANY),
    Row("gateway SIGTERM", "streams end where they are", end_gateway, gateways=2, resumes=True, most_pause_s=1.0,
        hold_s=1.0),
    Row("every process starved", _FLOWS, starve, moves=False),
    Row("300 clients leave", "others feel nothing", leave, moves=False, most_pause_s=0.25, hold_s=2.0),
    Row("16 clients with 1 MiB texts", _FLOWS, hostile_texts, workers=1, moves=False, most_pause_s=0.25),
]  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
