"""The memory of another worker's pool, as this process has mapped it, and the blocks that are borrowed from it.

Runs on the event loop; a thread maps and copies. A copy counts once the other worker has confirmed that the block was
unchanged until it was copied: whatever happens to that worker, no other contents are taken for it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import structlog
from grpc import StatusCode, aio

from protos import cache_pb2 as cache
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services.worker.kvcache.loan_copies import LoanCopies
from services.worker.kvcache.shared_memory import CannotShare, MappedPool, SharedMemory
from services.worker.kvcache.tiers import BlockRequest
from services.worker.kvcache.transfer_cost import TransferCost

log = structlog.get_logger("worker.peers")

RETRY_S = 60.0
"""Seconds after which a worker that does not share its memory is asked again: another one may have its address."""
_DOWN_S = 1.0
"""The same for a worker that does not answer."""
_ROOM_S = 0.001  # until a full buffer is tried again: its contents are what the engine has yet to take
_MEASURED_BLOCKS, _LEAST_MEASURED_BLOCKS = 32, 8
_ROUNDS = 2  # the first one compiles


@dataclass(frozen=True, slots=True)
class Borrower:
    """What a worker needs to borrow from others."""

    memory: SharedMemory
    host: str
    executor: Executor
    """One thread: a pool is not unmapped while it is copied from."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


@dataclass(frozen=True, slots=True)
class _Mapped:
    pool: MappedPool
    memory_id: bytes
    call: Any
    """The call that has described the memory: it ends when the other worker does."""


class MappedPeer:
    """The memory of the worker at one address."""

    def __init__(
        self,
        borrower: Borrower,
        address: str,
        layout: bytes,
        block_bytes: int,
        stub: Callable[[], "mesh_grpc.WorkerAsyncStub"],
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self.link = TransferCost()
        """The measured speed of copies."""
        self._borrower, self._address = borrower, address
        self._layout, self._block_bytes = layout, block_bytes
        self._stub, self._metadata = stub, metadata
        self._mapped: _Mapped | None = None
        self._retry_at = 0.0
        self._closed = False
        self._mapping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def mapped(self) -> bool:
        """Whether blocks can be borrowed."""
        return self._mapped is not None

    async def ready(self) -> bool:
        """Map the memory, unless that was refused lately. -> whether it is mapped, which it never is after `close`."""
        if self._closed:
            return False
        if self._mapped is None and (self._mapping is not None or time.monotonic() >= self._retry_at):
            if self._mapping is None:
                self._mapping = asyncio.create_task(self._map())
            await asyncio.shield(self._mapping)  # One caller's time may be over: others wait for it, too.
        return self._mapped is not None

    async def close(self) -> None:
        """Unmap the memory for good."""
        self._closed = True
        tasks = [task for task in (self._mapping, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def borrow(self, request: BlockRequest, received: Callable[[int], None]) -> str:
        """Copy the blocks as they are lent, and answer with each that is confirmed. received(n): so many more came.
        -> the outcome. Raises AioRpcError and CannotShare."""
        mapped = self._mapped
        if mapped is None:
            return "failed"
        call = self._stub().LendBlocks(metadata=self._metadata)
        responses = _Responses(call)
        blocks = cache.BlockList(keys=b"".join(request.keys), layout=self._layout)
        opening = mesh.OpenLoan(blocks=blocks, follow=request.follow, memory_id=mapped.memory_id, in_parts=True)
        try:
            await _send(call, mesh.LendBlocksRequest(open=opening))
            return await self._copy_lent(call, responses, LoanCopies(mapped.pool), request, received)
        finally:
            responses.close()
            call.cancel()

    async def _copy_lent(
        self,
        call: Any,
        responses: "_Responses",
        copies: LoanCopies,
        request: BlockRequest,
        received: Callable[[int], None],
    ) -> str:
        kept = 0
        while kept < len(request.keys):
            if request.abandoned:
                return "abandoned"
            full = False
            if copies.waiting:
                began = time.monotonic()
                made, anew = await self._borrower.run(copies.copy)
                if made >= _LEAST_MEASURED_BLOCKS and anew:
                    self.link.moved(made * self._block_bytes, time.monotonic() - began)
                if made:
                    await _send(call, mesh.LendBlocksRequest(copied=copies.copied))
                full = not made and not copies.unconfirmed
            response = await responses.next(_ROOM_S if full else None)
            if response is None:
                continue
            if response is aio.EOF or response.over:
                return "revoked" if copies.waiting or copies.unconfirmed else "absent"
            if response.layers:
                await self._borrower.run(copies.begin, response.places, response.first_layer, response.layers)
            else:
                copies.lend(response.places, response.first_layer)
            if response.kept > kept:
                count = min(response.kept, copies.copied) - kept
                kept += count
                received(count)
                request.answer(request, copies.take(count))
        return "fetched"

    # ---- mapping ----

    async def _map(self) -> None:
        call = self._stub().ShareMemory(
            mesh.ShareMemoryRequest(host=self._borrower.host, layout=self._layout), metadata=self._metadata
        )
        try:
            described: Any = await call.read()
            if described is aio.EOF:
                raise CannotShare("the other worker has ended the call")
            pool = await self._borrower.run(self._borrower.memory.map, described.memory)
            try:
                self.link = await self._measured(pool)
            except BaseException:
                await self._borrower.run(pool.close)
                raise
        except (aio.AioRpcError, CannotShare) as error:
            self._refused(error)
            call.cancel()
        else:
            self._mapped = _Mapped(pool, described.memory_id, call)
            self._watching = asyncio.create_task(self._watch(self._mapped))
            cost = {"latency_s": self.link.latency_s, "byte_s": self.link.byte_s}
            log.info("blocks come from the other worker's memory", at=self._address, **cost)
        finally:
            self._mapping = None

    async def _measured(self, pool: MappedPool) -> TransferCost:
        """The seconds of copying the padding block once, and some times."""
        for _ in range(_ROUNDS):
            link = TransferCost()
            for count in (1, _MEASURED_BLOCKS):
                began = time.monotonic()
                copied = len(await self._borrower.run(pool.copy, [0] * count))
                elapsed_s = time.monotonic() - began
                if count == 1:
                    link.answered(elapsed_s)
                else:
                    link.moved(copied * self._block_bytes, elapsed_s)
        return link

    def _refused(self, error: aio.AioRpcError | CannotShare) -> None:
        if isinstance(error, aio.AioRpcError) and error.code() in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED):
            self._retry_at = time.monotonic() + _DOWN_S
            return
        self._retry_at = time.monotonic() + RETRY_S
        reason = error.details() if isinstance(error, aio.AioRpcError) else str(error)
        log.info("blocks come over gRPC: the other worker's memory cannot be mapped", at=self._address, reason=reason)

    async def _watch(self, mapped: _Mapped) -> None:
        """Unmap the memory as soon as the other worker is gone: its device memory is free only then."""
        try:
            with contextlib.suppress(aio.AioRpcError):
                await mapped.call.read()
        finally:
            self._mapped = None
            mapped.call.cancel()
            closing = asyncio.ensure_future(self._borrower.run(mapped.pool.close))
            await asyncio.shield(closing)
            log.info("the other worker's memory is unmapped", at=self._address)


class _Responses:
    """Reads the messages of a call, and may wait for one for a while only: a cancelled read would cancel the call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._reading: asyncio.Task[Any] | None = None

    async def next(self, within_s: float | None) -> Any:
        """The next message, EOF after the last one, or None if none arrives within `within_s` seconds. Raises
        AioRpcError."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        done, _ = await asyncio.wait([self._reading], timeout=within_s)
        if not done:
            return None
        read, self._reading = self._reading, None
        return read.result()

    def close(self) -> None:
        """Stop waiting for a message."""
        if self._reading is not None and not self._reading.cancel() and not self._reading.cancelled():
            self._reading.exception()  # The call has failed, which matters no more: asyncio shall not report it.


async def _send(call: Any, request: mesh.LendBlocksRequest) -> None:
    """Send a message, unless the other worker has ended the call: the next message that is read says so."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(request)
