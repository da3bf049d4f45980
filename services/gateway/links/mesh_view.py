"""The state of the whole mesh, read from the scheduler once a second while someone watches. Changes nothing."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import structlog
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import SchedulerStub
from services import rpc
from services.gateway.traffic import percentiles
from services.security import mesh_id as mesh_ids

log = structlog.get_logger("mesh")

INTERVAL_S = 1.0
_TIMEOUT_S = 2.0


class MeshView:
    """The mesh as the scheduler reports it. All watchers share one call per second."""

    def __init__(
        self,
        scheduler_address: str,
        gateway_id: str,
        mesh_id: str,
        cache_state: Callable[[], "api.CacheState.ValueType"],
    ) -> None:
        self._address = scheduler_address
        self._gateway_id = gateway_id
        self._metadata = mesh_ids.metadata(mesh_id)
        self._cache_state = cache_state
        self._watchers = 0
        self._closed = False
        self._latest: api.MeshSnapshot | None = None
        self._changed = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    async def watch(self) -> AsyncGenerator[api.MeshSnapshot, None]:
        """A snapshot at once, and then about one per second until `close`. A slow reader misses snapshots.

        If the shared call ends with an unexpected exception, all readers receive it.
        """
        self._watchers += 1
        if self._polling is None:
            self._latest = None
            self._polling = asyncio.create_task(self._poll())
            self._polling.add_done_callback(lambda _: self._notify())
        polling = self._polling
        try:
            while not self._closed:
                if polling.done():
                    polling.result()
                changed = self._changed
                if self._latest is not None:
                    yield self._latest
                await changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    def close(self) -> None:
        """Ends all watches."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _poll(self) -> None:
        async with rpc.link_channel(self._address, "scheduler") as channel:
            stub = SchedulerStub(channel)
            overview = mesh.OverviewResponse()
            while True:
                began = time.monotonic()
                try:
                    overview = await stub.Overview(mesh.OverviewRequest(), timeout=_TIMEOUT_S, metadata=self._metadata)
                    connected = True
                except aio.AioRpcError as error:
                    log.debug("no overview", code=error.code().name)
                    connected = False
                self._latest = snapshot_of(overview)
                self._latest.at_s = time.time()
                self._latest.scheduler_connected = connected
                self._latest.cache = self._cache_state()
                self._latest.gateway_id = self._gateway_id
                self._notify()
                await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began)))


def snapshot_of(overview: mesh.OverviewResponse) -> api.MeshSnapshot:
    """The public form of the scheduler's overview: without addresses, with percentiles over all gateways."""
    reports = overview.gateway_reports
    known = {model.name: model for model in overview.models}
    names = sorted(known.keys() | {each.model for each in overview.loading})
    workers = [*map(_worker, overview.workers), *map(_loading, overview.loading)]
    return api.MeshSnapshot(
        gateways=map(_gateway, reports),
        models=[_model(known.get(name, mesh.ModelOverview(name=name)), reports) for name in names],
        workers=sorted(workers, key=lambda worker: (worker.model, worker.worker_id)),
    )


def _gateway(report: mesh.GatewayReport) -> api.GatewayState:
    window_s = report.window_s or 1.0
    return api.GatewayState(
        gateway_id=report.gateway_id,
        running=report.running,
        requests_per_s=sum(each.requests for each in report.models) / window_s,
        tokens_per_s=sum(each.tokens for each in report.models) / window_s,
    )


def _model(model: mesh.ModelOverview, reports: Sequence[mesh.GatewayReport]) -> api.ModelState:
    traffic = [
        (each, report.window_s or 1.0)
        for report in reports
        for each in report.models
        if each.model == model.name or each.model.startswith(f"{model.name}:")  # with an adapter
    ]

    def rate(name: str) -> float:
        return sum(float(getattr(each, name)) / window_s for each, window_s in traffic)

    def share(part: str, whole: str) -> float:
        total = sum(getattr(each, whole) for each, _ in traffic)
        return sum(getattr(each, part) for each, _ in traffic) / total if total else 0.0

    return api.ModelState(
        name=model.name,
        aliases=model.aliases,
        context_length=model.context_length,
        block_size=model.block_size,
        waiting=model.waiting,
        waiting_tokens=model.waiting_tokens,
        following=model.following,
        requests_per_s=rate("requests"),
        failed_per_s=rate("failed"),
        tokens_per_s=rate("tokens"),
        result_hit_share=share("result_hits", "requests"),
        cached_share=share("cached_tokens", "prompt_tokens"),
        first_token=percentiles(each.first_token for each, _ in traffic),
        inter_token=percentiles(each.inter_token for each, _ in traffic),
    )


def _worker(worker: mesh.WorkerOverview) -> api.WorkerState:
    report = worker.report
    return api.WorkerState(
        worker_id=worker.worker_id,
        model=worker.model,
        phase=_phase(worker),
        jobs=worker.jobs,
        credits=worker.credits,
        running=report.running,
        waiting=report.waiting,
        prefill_backlog=report.prefill_backlog,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        active_blocks=report.active_blocks,
        decode_s=report.decode_s,
        prefill_rate=report.prefill_rate,
        steps=report.steps,
        preemptions=report.preemptions,
        role=worker.role,
    )


def _phase(worker: mesh.WorkerOverview) -> "api.WorkerState.Phase.ValueType":
    if worker.detached:
        return api.WorkerState.PHASE_DETACHED
    if worker.report.draining:
        return api.WorkerState.PHASE_DRAINING
    return api.WorkerState.PHASE_READY if worker.ready else api.WorkerState.PHASE_SILENT


def _loading(worker: mesh.WorkerLoading) -> api.WorkerState:
    percent = min(100, 100 * worker.done // worker.total) if worker.total else 0
    return api.WorkerState(
        worker_id=worker.worker_id,
        model=worker.model,
        phase=api.WorkerState.PHASE_LOADING,
        step=worker.phase,
        percent=percent,
    )
