"""Tells the scheduler how far this worker's start is, until it is attached. Knows phases, no model and no jobs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import structlog
from grpc import aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc

log = structlog.get_logger("worker.announce")

# A small model's weights and warm-up take tenths of a second each: news must not be older than a fraction of that.
LOOK_S = 0.02
RETRY_S = 1.0


@dataclass
class Startup:
    """What the worker will be, and how far its start is."""

    worker_id: str = ""
    model: str = ""
    phase: str = "starting"
    done: int = 0
    total: int = 0


async def announce(address: str, aliases: Sequence[str], startup: Startup) -> None:
    """Keeps the scheduler informed; returns when it has heard the worker's hello. Failures only cost the news."""
    first = mesh.WorkerLoading(worker_id=startup.worker_id, model=startup.model, aliases=aliases)
    async with rpc.link_channel(address) as channel:
        stub = mesh_grpc.SchedulerStub(channel)
        while startup.phase != READY:
            try:
                async for _ in stub.Attach(_messages(first, startup), wait_for_ready=True):
                    pass
            except aio.AioRpcError as error:
                log.debug("not announced", code=error.code().name)
                await asyncio.sleep(RETRY_S)


async def _messages(first: mesh.WorkerLoading, startup: Startup) -> AsyncIterator[mesh.AttachRequest]:
    """A message whenever there is news. It stays silent after the last one: the scheduler ends the stream."""
    said: mesh.WorkerLoading | None = None
    while True:
        loading = mesh.WorkerLoading()
        loading.CopyFrom(first)
        loading.phase, loading.done, loading.total = startup.phase, startup.done, startup.total
        if loading != said and startup.phase != READY:
            said = loading
            yield mesh.AttachRequest(loading=loading)
        await asyncio.sleep(LOOK_S)


READY = "ready"
"""The phase in which a worker serves."""
