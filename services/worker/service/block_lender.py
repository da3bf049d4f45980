"""Lets other workers of this host copy KV blocks out of this worker's memory. Knows requests and places, no engine.

What describes the memory is as secret as what is in it: only authenticated links carry it.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Protocol

import structlog
from grpc import StatusCode

from protos import cache_pb2 as cache
from protos import mesh_pb2 as mesh
from services.block_messages import keys_of
from services.errors import WeftError, invalid
from services.worker.engine.base import BlockLoan, LentBlocks

log = structlog.get_logger("worker.peers")


class LendingEngine(Protocol):
    """The part of an engine that is used here. May be called from any thread."""

    @property
    def block_layout(self) -> str:
        """The layout of blocks' contents; empty: they have none."""

    def lend_blocks(self, loan: BlockLoan) -> None:
        """Lends blocks."""

    def wake(self) -> None:
        """Makes it look at its loans."""


class BlockLender:
    """Answers ShareMemory and LendBlocks."""

    def __init__(self, engine: LendingEngine, memory: bytes, host: str, protected: bool) -> None:
        """memory: describes the memory of blocks to another process; empty: it cannot be shared. host: this one;
        empty: unknown. protected: the links of the mesh are authenticated."""
        self._engine, self._memory, self._host, self._protected = engine, memory, host, protected
        self._layout = engine.block_layout.encode()
        self._memory_id = secrets.token_bytes(16)
        self.lent = 0
        """Blocks so far."""

    async def share(self, request: mesh.ShareMemoryRequest) -> AsyncIterator[mesh.ShareMemoryResponse]:
        """Describes the memory, and stays until the caller leaves. Raises WeftError where it is not shared."""
        self._check(request.layout)
        if not self._host or request.host != self._host:
            raise _refused("OTHER_HOST", "this worker runs on another host")
        yield mesh.ShareMemoryResponse(memory=self._memory, memory_id=self._memory_id)
        await asyncio.Event().wait()

    async def lend(self, requests: AsyncIterator[mesh.LendBlocksRequest]) -> AsyncIterator[mesh.LendBlocksResponse]:
        """Yields places and confirmations until the borrower ends the call. Raises WeftError for a request that has no
        answer."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "open":
            raise invalid("message", "the first message must be open")
        keys = self._keys_of(first.open.blocks)
        if first.open.memory_id != self._memory_id:
            raise _refused("OTHER_MEMORY", "the caller has mapped the memory of another process")
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[mesh.LendBlocksResponse | WeftError | None] = asyncio.Queue()

        def lent(part: LentBlocks | None) -> None:
            """The engine's thread calls it."""
            answer = mesh.LendBlocksResponse(over=True)
            if part is not None:
                answer = mesh.LendBlocksResponse(places=part.blocks, first_layer=part.begin, layers=part.end or 0)
            loop.call_soon_threadsafe(answers.put_nowait, answer)

        loan = BlockLoan(keys, first.open.follow, lent, first.open.in_parts)
        self._engine.lend_blocks(loan)
        reader = asyncio.create_task(self._read(requests, loan, answers))
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, WeftError):
                    raise answer
                yield answer
        finally:
            reader.cancel()
            loan.cancelled = True
            self._engine.wake()

    async def _read(
        self,
        requests: AsyncIterator[mesh.LendBlocksRequest],
        loan: BlockLoan,
        answers: "asyncio.Queue[mesh.LendBlocksResponse | WeftError | None]",
    ) -> None:
        """Returns what the borrower has copied, and confirms it: as long as the loan is not over, all blocks that are
        lent are unchanged."""
        async for request in requests:
            if request.WhichOneof("message") != "copied" or not loan.returned < request.copied <= loan.lent:
                answers.put_nowait(invalid("copied", "must be more than before, and at most what is lent"))
                return
            if loan.over:
                continue
            self.lent += request.copied - loan.returned
            loan.returned = request.copied
            answers.put_nowait(mesh.LendBlocksResponse(kept=request.copied))
            self._engine.wake()
        answers.put_nowait(None)

    def _keys_of(self, blocks: cache.BlockList) -> list[bytes]:
        self._check(blocks.layout)
        return keys_of(blocks)

    def _check(self, layout: bytes) -> None:
        if not self._protected:
            raise _refused("UNPROTECTED", "memory is shared over authenticated links alone, and the mesh has none")
        if not self._memory:
            raise _refused("NOT_SHARED", "this worker's blocks are in no memory that others can map")
        if layout != self._layout:
            raise _refused("OTHER_LAYOUT", "this worker's blocks have another layout")


def _refused(reason: str, message: str) -> WeftError:
    return WeftError(StatusCode.FAILED_PRECONDITION, reason, message)
