"""How far the workers of a mesh on this machine are with their start, asked of each one itself. Prints nothing."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs
from services import rpc

_LOOK_S = 0.1
_PATIENCE_S = 1.0
_READY = "ready"


@dataclass(frozen=True, slots=True)
class Loading:
    """What a worker does before it is ready, and how much of that is done: 0 to 100, None where nobody can tell."""

    phase: str
    percent: int | None = None

    def __str__(self) -> str:
        return self.phase if self.percent is None else f"{self.phase} {self.percent}%"


async def watch(workers: Mapping[str, str], tell: Callable[[str, Loading], None]) -> None:
    """Tells of each worker (name: host:port) whenever it is further, until all are ready."""
    await asyncio.gather(*(_watch(name, address, tell) for name, address in workers.items()))


async def _watch(name: str, address: str, tell: Callable[[str, Loading], None]) -> None:
    async with rpc.link_channel(address) as channel:
        stub: stubs.WorkerAsyncStub = stubs.WorkerStub(channel)
        last: Loading | None = None
        while last is None or last.phase != _READY:
            try:
                status = await stub.Status(mesh.StatusRequest(), timeout=_PATIENCE_S)
            except grpc.RpcError:  # It does not listen yet, or was started again.
                await asyncio.sleep(_LOOK_S)
                continue
            now = Loading(status.phase, min(100, 100 * status.done // status.total) if status.total else None)
            if now != last and now.phase != _READY:
                tell(name, now)
            last = now
            await asyncio.sleep(_LOOK_S)
