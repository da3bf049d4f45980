"""Follows the start of the workers of a mesh on this machine by asking each one for its status. Prints nothing."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs
from services.security import mesh_id as mesh_ids
from weft.launch.reach import PLAIN, Reach

_POLL_S = 0.1
_TIMEOUT_S = 1.0
_READY = "ready"


@dataclass(frozen=True, slots=True)
class Loading:
    """A phase of a worker's start, and its progress: 0 to 100 percent, None where it is unknown."""

    phase: str
    percent: int | None = None

    def __str__(self) -> str:
        return self.phase if self.percent is None else f"{self.phase} {self.percent}%"


async def watch(
    workers: Mapping[str, str], notify: Callable[[str, Loading], None], mesh_id: str = "", reach: Reach = PLAIN
) -> None:
    """Calls `notify` with the name of a worker (name: host:port) at each progress, until all are ready."""
    await asyncio.gather(*(_watch(name, address, notify, mesh_id, reach) for name, address in workers.items()))


async def _watch(name: str, address: str, notify: Callable[[str, Loading], None], mesh_id: str, reach: Reach) -> None:
    metadata = mesh_ids.metadata(mesh_id)
    async with reach.channel(address, "worker") as channel:
        stub: stubs.WorkerAsyncStub = stubs.WorkerStub(channel)
        last: Loading | None = None
        while last is None or last.phase != _READY:
            try:
                status = await stub.Status(mesh.StatusRequest(), timeout=_TIMEOUT_S, metadata=metadata)
            except grpc.RpcError:  # It does not listen yet, or was restarted.
                await asyncio.sleep(_POLL_S)
                continue
            now = Loading(status.phase, min(100, 100 * status.done // status.total) if status.total else None)
            if now != last and now.phase != _READY:
                notify(name, now)
            last = now
            await asyncio.sleep(_POLL_S)
