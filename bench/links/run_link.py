"""A minimal gateway: sends jobs to a worker over a Run link and counts messages and tokens. Knows no clients."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.mesh.processes import meanwhile
from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as stubs
from services import rpc
from services.send_queue import SendQueue
from weft.load.distribution import Distribution

_PROMPT = 16
_MANY = 120_000


class Reader:
    """One Run link and its counters."""

    def __init__(self, number: int, rows: int) -> None:
        self.tokens = 0
        self.messages = 0
        self.gaps = Distribution()
        """Milliseconds between messages."""
        self._last = 0.0
        self._reads = asyncio.Event()
        self._reads.set()
        self._first = asyncio.Event()
        self._outbox: SendQueue[mesh.RunRequest] = SendQueue()
        self._outbox.put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id=f"bench-{number}")))
        for row in range(1, rows + 1):
            self._outbox.put(mesh.RunRequest(job=_job(f"bench-{number}-{row}", row)))

    def stop_reading(self) -> None:
        """Stop reading while the connection stays open, as a suspended process does."""
        self._reads.clear()

    def begin(self) -> None:
        """Reset the counters."""
        self.tokens = self.messages = 0
        self.gaps = Distribution()
        self._last = 0.0

    async def started(self) -> None:
        """Wait for the first tokens."""
        await self._first.wait()

    async def read(self, address: str) -> None:
        """Read until cancelled."""
        async with rpc.link_channel(address, "worker") as channel:
            stub: Any = stubs.WorkerStub(channel)
            call = stub.Run(aiter(self._outbox))
            async for message in call:
                now = time.monotonic()
                if self._last:
                    self.gaps.add((now - self._last) * 1e3)
                self._last = now
                self.messages += 1
                self.tokens += len(message.stream_ids)
                self._first.set()
                if not self._reads.is_set():
                    await self._reads.wait()


@contextlib.asynccontextmanager
async def readers(address: str, rows: Sequence[int]) -> AsyncIterator[list[Reader]]:
    """Open one link per entry of `rows`, each with that many running jobs."""
    links = [Reader(number, count) for number, count in enumerate(rows)]
    async with meanwhile(*(link.read(address) for link in links)):
        async with asyncio.timeout(30):
            await asyncio.gather(*(link.started() for link in links))
        yield links


def _job(job_id: str, row: int) -> mesh.Job:
    sampling = api.Sampling(max_tokens=_MANY, temperature=0.0, seed=row, ignore_eos=True)
    return mesh.Job(
        stream_id=row,
        job_id=job_id,
        attempt=1,
        token_ids=[row] * _PROMPT,
        prompt_len=_PROMPT,
        sampling=sampling,
        placement=row,
    )
