"""Where a worker's steps go while a load runs: the scheduler names a worker, that is asked for a profile."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import RpcError, aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs

_ANSWER_S = 5.0
_GRACE_S = 30.0


class ProfileError(Exception):
    """There is no profile; the message is one line."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall be profiled, and where the trace goes."""

    steps: int
    file: Path
    """Chrome's format, compressed with gzip: for ui.perfetto.dev or chrome://tracing."""
    scheduler: str
    """host:port."""


async def take(wish: Wish, model: str) -> dict[str, Any]:
    """Observes the next steps of a worker that serves `model` (empty: any). Raises ProfileError.

    -> worker, steps, seconds, and by name the seconds of phases of the host and of what computed; on_gpu, trace.
    """
    try:
        worker = await _worker(wish.scheduler, model)
        async with aio.insecure_channel(worker.address) as channel:
            stub: stubs.WorkerAsyncStub = stubs.WorkerStub(channel)
            summary, trace = mesh.ProfileSummary(), bytearray()
            async for message in stub.Profile(mesh.ProfileRequest(steps=wish.steps)):
                if message.HasField("summary"):
                    summary = message.summary
                trace += message.trace
    except RpcError as error:
        told = error.details() if isinstance(error, aio.AioRpcError) else ""
        raise ProfileError(f"no profile: {told or error}") from None
    await asyncio.to_thread(wish.file.write_bytes, bytes(trace))
    return {
        "worker": worker.worker_id,
        "steps": summary.steps,
        "seconds": summary.seconds,
        "host": {part.name: part.seconds for part in summary.host},
        "device": {part.name: part.seconds for part in summary.device},
        "on_gpu": summary.on_gpu,
        "trace": str(wish.file),
    }


async def finish(taking: "asyncio.Task[dict[str, Any]]") -> dict[str, Any]:
    """The profile, when the load is over. Raises ProfileError: also if it ended before enough steps were seen."""
    try:
        async with asyncio.timeout(_GRACE_S):
            return await taking
    except TimeoutError:
        raise ProfileError("no profile: the load ended before so many steps") from None


async def _worker(scheduler: str, model: str) -> mesh.WorkerOverview:
    async with aio.insecure_channel(scheduler) as channel:
        stub: stubs.SchedulerAsyncStub = stubs.SchedulerStub(channel)
        try:
            overview = await stub.Overview(mesh.OverviewRequest(), timeout=_ANSWER_S)
        except aio.AioRpcError:
            raise ProfileError(f"{scheduler} is no scheduler: name its address with --scheduler") from None
    found = [worker for worker in overview.workers if model in ("", worker.model)]
    if not found:
        raise ProfileError(f"{scheduler} knows no worker of {model}")
    return found[0]
