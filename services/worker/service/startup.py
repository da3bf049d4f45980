"""Reports the progress of this worker's start to the scheduler. Knows phases, no model and no jobs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import structlog
from grpc import aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc

log = structlog.get_logger("worker.announce")

POLL_S = 0.02
"""How often progress is checked. Weights and warm-up of a small model take tenths of a second each."""
RETRY_S = 1.0


@dataclass
class Startup:
    """The worker's id and model name, and the progress of its start: `done` of `total`, which is 0 if unknown."""

    worker_id: str = ""
    model: str = ""
    phase: str = "starting"
    done: int = 0
    total: int = 0
    mesh_id: str = ""


async def announce(address: str, aliases: Sequence[str], startup: Startup) -> None:
    """Reports progress until the scheduler ends the stream, after the worker's hello. Failures only delay reports."""
    first = mesh.WorkerLoading(
        worker_id=startup.worker_id, model=startup.model, aliases=aliases, mesh_id=startup.mesh_id
    )
    async with rpc.link_channel(address, "scheduler") as channel:
        stub = mesh_grpc.SchedulerStub(channel)
        while startup.phase != READY:
            try:
                async for _ in stub.Attach(_messages(first, startup), wait_for_ready=True):
                    pass
            except aio.AioRpcError as error:
                log.debug("the progress of the start was not reported", code=error.code().name)
                await asyncio.sleep(RETRY_S)


async def _messages(first: mesh.WorkerLoading, startup: Startup) -> AsyncIterator[mesh.AttachRequest]:
    """Yields a message whenever the progress has changed. It never ends by itself: the scheduler ends the stream."""
    last: mesh.WorkerLoading | None = None
    while True:
        loading = mesh.WorkerLoading()
        loading.CopyFrom(first)
        loading.phase, loading.done, loading.total = startup.phase, startup.done, startup.total
        if loading != last and startup.phase != READY:
            last = loading
            yield mesh.AttachRequest(loading=loading)
        await asyncio.sleep(POLL_S)


READY = "ready"
"""The phase of a worker that serves."""
