"""A live view of a mesh: its workers, their load and their speed. Reads from scheduler and workers, changes nothing."""

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
_TIMEOUT_S = 1.0
_BAR = 12


class NoScheduler(Exception):
    """No scheduler answers at the address."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as the scheduler reports it, and its own status; None if it does not answer."""

    overview: mesh.WorkerOverview
    status: mesh.StatusResponse | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mesh at one moment."""

    at_s: float
    gateways: int
    models: list[mesh.ModelOverview]
    workers: list[WorkerSnapshot]
    loading: list[mesh.WorkerLoading]
    """Workers whose start is not over."""

    def steps(self) -> dict[str, int]:
        """Steps that each worker has completed, by its id."""
        return {each.overview.worker_id: each.status.report.steps for each in self.workers if each.status is not None}


class MeshProbe:
    """Takes snapshots of a mesh over connections that it keeps."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler
        self._channels: dict[str, aio.Channel] = {}

    async def snapshot(self) -> Snapshot:
        """The mesh now. Raises NoScheduler."""
        stub: stubs.SchedulerAsyncStub = stubs.SchedulerStub(self._channel(self._scheduler))
        try:
            overview = await stub.Overview(mesh.OverviewRequest(), timeout=_TIMEOUT_S)
        except aio.AioRpcError as error:
            answered = error.code() is not grpc.StatusCode.UNAVAILABLE
            problem = f"{self._scheduler} is no scheduler" if answered else f"no scheduler at {self._scheduler}"
            raise NoScheduler(f"{problem}: name its address with --scheduler") from None
        workers = await asyncio.gather(*(self._worker(worker) for worker in overview.workers))
        await self._close_others({worker.address for worker in overview.workers})
        return Snapshot(
            time.monotonic(), overview.gateways, list(overview.models), list(workers), list(overview.loading)
        )

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _worker(self, worker: mesh.WorkerOverview) -> WorkerSnapshot:
        stub: stubs.WorkerAsyncStub = stubs.WorkerStub(self._channel(worker.address))
        try:
            return WorkerSnapshot(worker, await stub.Status(mesh.StatusRequest(), timeout=_TIMEOUT_S))
        except aio.AioRpcError:
            return WorkerSnapshot(worker, None)

    async def _close_others(self, present: set[str]) -> None:
        gone = self._channels.keys() - present - {self._scheduler}
        await asyncio.gather(*(self._channels.pop(address).close() for address in gone))

    def _channel(self, address: str) -> aio.Channel:
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address)
        return self._channels[address]


async def show(scheduler: str, out: Console, *, once: bool) -> None:
    """Prints one snapshot, or follows the mesh until it is cancelled. Raises NoScheduler if none answers at first."""
    probe = MeshProbe(scheduler)
    try:
        last = await probe.snapshot()
        if once:
            out.print(render(last))
            return
        with Live(render(last), console=out, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    now = await probe.snapshot()
                except NoScheduler as error:
                    live.update(Group(render(last), str(error)), refresh=True)
                    continue
                live.update(render(now, last), refresh=True)
                last = now
    finally:
        await probe.close()


def render(now: Snapshot, before: Snapshot | None = None) -> Group:
    """The snapshot as two tables, with the steps per second since an earlier snapshot."""
    counts = f"{len(now.workers)} workers, {now.gateways} gateways"
    if now.loading:
        counts += f", {len(now.loading)} workers loading"
    return Group(
        f"{counts}, {sum(model.waiting for model in now.models)} jobs queued", "", _models(now), _workers(now, before)
    )


def _models(now: Snapshot) -> Table:
    table = _table(["model"], ["workers", "queued", "queued tokens", "following"])
    for model in now.models:
        serving = sum(worker.overview.model == model.name for worker in now.workers)
        numbers = (serving, model.waiting, model.waiting_tokens, model.following)
        table.add_row(model.name, *map(str, numbers))
    return table


def _workers(now: Snapshot, before: Snapshot | None) -> Table:
    numbers = ["jobs", "running", "waiting", "to prefill", "step ms", "steps/s", "prefill tok/s", "preempted"]
    table = _table(["worker", "state", "KV in use"], numbers)
    earlier = before.steps() if before is not None else {}
    for worker in now.workers:
        overview, status = worker.overview, worker.status
        jobs = f"{overview.jobs}/{overview.credits}"
        if status is None:
            table.add_row(overview.worker_id, "no answer", "", jobs, style="yellow")
            continue
        report = status.report
        rate = ""
        if before is not None and overview.worker_id in earlier:
            rate = f"{(report.steps - earlier[overview.worker_id]) / (now.at_s - before.at_s):.0f}"
        table.add_row(
            overview.worker_id,
            status.phase if overview.ready or status.phase != "ready" else "silent",
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
        table.add_row(each.worker_id, _progress(each), style="dim")
    return table


def _progress(loading: mesh.WorkerLoading) -> str:
    """The phase of a worker's start, with percent if they are known."""
    return f"{loading.phase} {100 * loading.done // loading.total}%" if loading.total else loading.phase


def _kv(report: mesh.WorkerReport) -> str:
    """A bar of the KV blocks in use and, lighter, of those that hold a cached prefix; then the share in use."""
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
