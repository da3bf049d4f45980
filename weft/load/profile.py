"""Profiles a worker while a load runs: the scheduler names a worker, which records its next steps."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import RpcError, aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs
from services import rpc
from weft.client.errors import from_rpc

_TIMEOUT_S = 5.0
_GRACE_S = 30.0


class ProfileError(Exception):
    """No profile was taken; the message is one line."""


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """How many steps are profiled, and where the trace is written."""

    steps: int
    file: Path
    """Written in Chrome's trace format, compressed with gzip: for ui.perfetto.dev or chrome://tracing."""
    scheduler: str
    """host:port."""


async def take(spec: ProfileSpec, model: str) -> dict[str, Any]:
    """Profiles the next steps of a worker that serves `model` (empty: any). Raises ProfileError.

    -> worker, steps, seconds, seconds by phase of the host and by group of kernels or operators; on_gpu, trace.
    """
    try:
        worker = await _worker(spec.scheduler, model)
        async with rpc.link_channel(worker.address, "worker") as channel:
            stub: stubs.WorkerAsyncStub = stubs.WorkerStub(channel)
            summary, trace = mesh.ProfileSummary(), bytearray()
            async for message in stub.Profile(mesh.ProfileRequest(steps=spec.steps)):
                if message.HasField("summary"):
                    summary = message.summary
                trace += message.trace
    except RpcError as error:
        reason = from_rpc(error).message if isinstance(error, aio.AioRpcError) else str(error)
        raise ProfileError(f"no profile: {reason}") from None
    await asyncio.to_thread(spec.file.write_bytes, bytes(trace))
    return {
        "worker": worker.worker_id,
        "steps": summary.steps,
        "seconds": summary.seconds,
        "host": {part.name: part.seconds for part in summary.host},
        "device": {part.name: part.seconds for part in summary.device},
        "on_gpu": summary.on_gpu,
        "trace": str(spec.file),
    }


async def finish(taking: "asyncio.Task[dict[str, Any]]") -> dict[str, Any]:
    """The profile, after the load. Raises ProfileError, also if the load ended before all steps were observed."""
    try:
        async with asyncio.timeout(_GRACE_S):
            return await taking
    except TimeoutError:
        hint = "use more requests, or name the scheduler of this mesh with --scheduler"
        raise ProfileError(f"no profile: the load ended before all steps were observed: {hint}") from None


async def _worker(scheduler: str, model: str) -> mesh.WorkerOverview:
    async with rpc.link_channel(scheduler, "scheduler") as channel:
        stub: stubs.SchedulerAsyncStub = stubs.SchedulerStub(channel)
        try:
            overview = await stub.Overview(mesh.OverviewRequest(), timeout=_TIMEOUT_S)
        except aio.AioRpcError:
            hint = "name its address with --scheduler, and the folder of its secret with WEFT_HOME"
            raise ProfileError(f"no scheduler answers at {scheduler}: {hint}") from None
    found = [worker for worker in overview.workers if model in ("", worker.model)]
    if not found:
        raise ProfileError(f"the scheduler at {scheduler} has no worker of {model}")
    return found[0]
