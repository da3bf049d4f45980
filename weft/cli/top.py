"""A live view of a mesh: who runs what, how full and how fast. Asks scheduler and workers, changes nothing."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from grpc import aio
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs

REFRESH_S = 1.0
_PATIENCE_S = 1.0
_BAR = 12
_WIDTH = 160  # where there is no terminal


class NoScheduler(Exception):
    """Nobody answers where the scheduler should be."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker: what the scheduler says of it, and what it says itself; None if it does not answer."""

    overview: mesh.WorkerOverview
    status: mesh.StatusResponse | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mesh at a moment."""

    at_s: float
    gateways: int
    models: list[mesh.ModelOverview]
    workers: list[WorkerSnapshot]
    loading: list[mesh.WorkerLoading]
    """Those that will join."""

    def steps(self) -> dict[str, int]:
        """Steps that each worker has made."""
        return {seen.overview.worker_id: seen.status.report.steps for seen in self.workers if seen.status is not None}


class MeshProbe:
    """Looks at a mesh again and again over the same connections."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler
        self._channels: dict[str, aio.Channel] = {}

    async def look(self) -> Snapshot:
        """The mesh now. Raises NoScheduler."""
        stub: stubs.SchedulerAsyncStub = stubs.SchedulerStub(self._channel(self._scheduler))
        try:
            overview = await stub.Overview(mesh.OverviewRequest(), timeout=_PATIENCE_S)
        except aio.AioRpcError as error:
            here = error.code() is not grpc.StatusCode.UNAVAILABLE
            why = "is no scheduler" if here else "has no scheduler"
            raise NoScheduler(f"{self._scheduler} {why}: name its address with --scheduler") from None
        workers = await asyncio.gather(*(self._ask(worker) for worker in overview.workers))
        await self._forget({worker.address for worker in overview.workers})
        return Snapshot(
            time.monotonic(), overview.gateways, list(overview.models), list(workers), list(overview.loading)
        )

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _ask(self, worker: mesh.WorkerOverview) -> WorkerSnapshot:
        stub: stubs.WorkerAsyncStub = stubs.WorkerStub(self._channel(worker.address))
        try:
            return WorkerSnapshot(worker, await stub.Status(mesh.StatusRequest(), timeout=_PATIENCE_S))
        except aio.AioRpcError:
            return WorkerSnapshot(worker, None)

    async def _forget(self, present: set[str]) -> None:
        gone = self._channels.keys() - present - {self._scheduler}
        await asyncio.gather(*(self._channels.pop(address).close() for address in gone))

    def _channel(self, address: str) -> aio.Channel:
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address)
        return self._channels[address]


async def show(scheduler: str, out: Console, *, once: bool) -> None:
    """One render, or a live one until the task is cancelled. Raises NoScheduler if there is none at the beginning."""
    eye = MeshProbe(scheduler)
    try:
        last = await eye.look()
        if once:
            out.print(render(last), width=None if out.is_terminal else _WIDTH)
            return
        with Live(render(last), console=out, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    now = await eye.look()
                except NoScheduler as error:
                    live.update(Group(render(last), str(error)), refresh=True)
                    continue
                live.update(render(now, last), refresh=True)
                last = now
    finally:
        await eye.close()


def render(now: Snapshot, before: Snapshot | None = None) -> Group:
    """Two tables; with an earlier snapshot the steps per second between the two."""
    counts = f"{len(now.workers)} workers, {now.gateways} gateways"
    if now.loading:
        counts += f", {len(now.loading)} workers loading"
    return Group(
        f"{counts}, {sum(model.waiting for model in now.models)} jobs queued", "", _models(now), _workers(now, before)
    )


def _models(now: Snapshot) -> Table:
    table = _table(["model"], ["workers", "queued", "queued tokens", "following"])
    for model in now.models:
        serving = sum(seen.overview.model == model.name for seen in now.workers)
        numbers = (serving, model.waiting, model.waiting_tokens, model.following)
        table.add_row(model.name, *map(str, numbers))
    return table


def _workers(now: Snapshot, before: Snapshot | None) -> Table:
    numbers = ["jobs", "running", "waiting", "to prefill", "step ms", "steps/s", "prefill tok/s", "preempted"]
    table = _table(["worker", "state", "KV in use"], numbers)
    earlier = before.steps() if before is not None else {}
    for seen in now.workers:
        overview = seen.overview
        jobs = f"{overview.jobs}/{overview.credits}"
        if seen.status is None:
            table.add_row(overview.worker_id, "no answer", "", jobs, style="yellow")
            continue
        report = seen.status.report
        rate = ""
        if before is not None and overview.worker_id in earlier:
            rate = f"{(report.steps - earlier[overview.worker_id]) / (now.at_s - before.at_s):.0f}"
        table.add_row(
            overview.worker_id,
            seen.status.phase if overview.ready or seen.status.phase != "ready" else "silent",
            _kv(report),
            jobs,
            str(report.running),
            str(report.waiting),
            str(report.prefill_backlog),
            f"{report.decode_s * 1e3:.2f}" if report.decode_s else "",
            rate,
            f"{report.prefill_rate:.0f}" if report.prefill_rate else "",
            str(report.preemptions),
        )
    for each in now.loading:
        table.add_row(each.worker_id, _start(each), style="dim")
    return table


def _start(loading: mesh.WorkerLoading) -> str:
    """What a worker does before it is ready, and how far that is."""
    return f"{loading.phase} {100 * loading.done // loading.total}%" if loading.total else loading.phase


def _kv(report: mesh.WorkerReport) -> str:
    """Used blocks, and lighter those that hold a prefix which may be found again."""
    total = report.free_blocks + report.cached_blocks + report.active_blocks
    if not total:
        return ""
    active = -(-report.active_blocks * _BAR // total)
    cached = min(-(-report.cached_blocks * _BAR // total), _BAR - active)
    bar = "█" * active + "▒" * cached + "░" * (_BAR - active - cached)
    return f"{bar} {report.active_blocks / total:4.0%}"


def _table(words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
