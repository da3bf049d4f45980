"""Sends KV blocks to other workers as frames in pieces, rounded where they ask for it. Knows requests and bytes, no
engine."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from grpc import StatusCode

from protos import cache_pb2 as cache
from protos import mesh_pb2 as mesh
from services.block_messages import MESSAGE_BYTES, Rounding, keys_of, pieces_of, seal_block
from services.errors import WeftError, invalid
from services.worker.engine.base import BlockRead


class BlockEngine(Protocol):
    """The part of an engine that is used here. May be called from any thread."""

    @property
    def block_layout(self) -> str:
        """The layout of blocks' contents; empty: they have none."""

    def read_blocks(self, read: BlockRead) -> None:
        """Answers a request for contents of blocks."""

    def wake(self) -> None:
        """Makes it read on."""


class BlockSender:
    """Answers ReadBlocks."""

    def __init__(self, engine: BlockEngine, secret: bytes, rounding: Rounding | None = None) -> None:
        """`secret` keys the frames; empty for none. rounding: of the engine's blocks, for workers that ask for fp8;
        None: all blocks are sent as they are."""
        self._engine, self._secret, self._rounding = engine, secret, rounding
        self._layout = engine.block_layout.encode()
        self.sent = 0
        """Blocks so far."""

    async def send(self, request: mesh.ReadBlocksRequest) -> AsyncIterator[mesh.ReadBlocksResponse]:
        """Yields the blocks up to the first that is missing. Raises WeftError for a request that has no answer."""
        rounding = self._rounding if request.format == mesh.BLOCK_FORMAT_FP8 else None
        sent = mesh.BLOCK_FORMAT_UNSPECIFIED if rounding is None else mesh.BLOCK_FORMAT_FP8
        if request.probe_bytes:
            if request.probe_bytes > MESSAGE_BYTES:
                raise invalid("probe_bytes", f"at most {MESSAGE_BYTES}")
            random = cache.BlockPiece(data=os.urandom(request.probe_bytes), last=True)
            yield mesh.ReadBlocksResponse(pieces=[random], format=sent)
            return
        async for index, frame, more in self._frames(self._keys_of(request.blocks), request.follow, rounding):
            for piece in pieces_of(index, frame):
                yield mesh.ReadBlocksResponse(pieces=[piece], more=more or not piece.last, format=sent)

    def _keys_of(self, blocks: cache.BlockList) -> list[bytes]:
        keys = keys_of(blocks)
        if not self._layout or blocks.layout != self._layout:
            raise WeftError(StatusCode.FAILED_PRECONDITION, "OTHER_LAYOUT", "this worker's blocks have another layout")
        return keys

    async def _frames(
        self, keys: Sequence[bytes], follow: bool, rounding: Rounding | None
    ) -> AsyncIterator[tuple[int, bytes, bool]]:
        """Yields index and frame of each block, and whether the next one is there already."""
        loop = asyncio.get_running_loop()
        contents: asyncio.Queue[Sequence[bytes] | None] = asyncio.Queue()
        read = BlockRead(keys, follow, lambda found: loop.call_soon_threadsafe(contents.put_nowait, found))
        self._engine.read_blocks(read)
        try:
            while (found := await contents.get()) is not None:
                for place, payload in enumerate(found, 1):
                    sealing = (keys[read.sent], self._layout, payload, self._secret, rounding)
                    frame = await asyncio.to_thread(seal_block, *sealing)
                    yield read.sent, frame, place < len(found) or not contents.empty()
                    read.sent += 1
                    self.sent += 1
                self._engine.wake()
        finally:
            read.cancelled = True
