"""The adapters of a mesh's workers, as a person's tool reaches them: through the scheduler's list of workers."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from grpc import aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs
from services import rpc
from weft.client.errors import from_rpc

_TIMEOUT_S = 5.0
_LOAD_S = 120.0


class AdaptersError(Exception):
    """A worker or the scheduler refuses; the message is one line."""


Listed = list[tuple[mesh.WorkerOverview, list[mesh.AdapterState]]]
"""Workers, and the adapters of each."""


async def listed(scheduler: str, model: str = "") -> Listed:
    """The adapters of each worker of a model (empty: of all models). Raises AdaptersError."""
    found = []
    for worker in await _workers(scheduler, model):
        async with _stub(worker) as stub:
            reply = await stub.ListAdapters(mesh.ListAdaptersRequest(), timeout=_TIMEOUT_S)
        found.append((worker, list(reply.adapters)))
    return found


async def load(scheduler: str, model: str, name: str, folder: Path) -> list[str]:
    """Let every worker of the model serve an adapter. -> the workers' ids. Raises AdaptersError."""
    workers = await _workers(scheduler, model, alone=True)
    for worker in workers:
        async with _stub(worker) as stub:
            await stub.LoadAdapter(mesh.LoadAdapterRequest(name=name, folder=str(folder)), timeout=_LOAD_S)
    return [worker.worker_id for worker in workers]


async def drop(scheduler: str, model: str, name: str) -> list[str]:
    """Let no worker of the model serve the adapter. -> the ids of those that did. Raises AdaptersError."""
    dropped = []
    for worker, adapters in await listed(scheduler, await _model(scheduler, model)):
        if name in (each.name for each in adapters):
            async with _stub(worker) as stub:
                await stub.DropAdapter(mesh.DropAdapterRequest(name=name), timeout=_TIMEOUT_S)
            dropped.append(worker.worker_id)
    if not dropped:
        raise AdaptersError(f"no worker serves an adapter {name}")
    return dropped


@contextlib.asynccontextmanager
async def _stub(worker: mesh.WorkerOverview) -> "AsyncIterator[stubs.WorkerAsyncStub]":
    """A stub of the worker. What it answers with an error raises AdaptersError."""
    async with rpc.link_channel(worker.address, "worker") as channel:
        try:
            stub: stubs.WorkerAsyncStub = stubs.WorkerStub(channel)
            yield stub
        except aio.AioRpcError as error:
            raise AdaptersError(f"{worker.worker_id}: {from_rpc(error).message}") from None


async def _model(scheduler: str, model: str) -> str:
    """The name of the model; without one, the only one that has workers. Raises AdaptersError."""
    return (await _workers(scheduler, model, alone=True))[0].model


async def _workers(scheduler: str, model: str, *, alone: bool = False) -> list[mesh.WorkerOverview]:
    """The workers of a model; without one, of all models, or of the only one. Raises AdaptersError."""
    async with rpc.link_channel(scheduler, "scheduler") as channel:
        stub: stubs.SchedulerAsyncStub = stubs.SchedulerStub(channel)
        try:
            overview = await stub.Overview(mesh.OverviewRequest(), timeout=_TIMEOUT_S)
        except aio.AioRpcError:
            hint = "name its address with --scheduler, and the folder of its secret with WEFT_HOME"
            raise AdaptersError(f"no scheduler answers at {scheduler}: {hint}") from None
    found = [worker for worker in overview.workers if model in ("", worker.model)]
    if not found:
        raise AdaptersError(f"the scheduler at {scheduler} has no worker{f' of {model}' if model else ''}")
    names = sorted({worker.model for worker in found})
    if alone and len(names) > 1:
        raise AdaptersError(f"several models are served: name one of {', '.join(names)} with --model")
    return found
