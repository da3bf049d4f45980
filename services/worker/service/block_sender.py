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
from services.worker.engine.base import BlockPart, BlockRead


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
        async for message in self._messages(request, rounding):
            message.format = sent
            yield message

    def _keys_of(self, blocks: cache.BlockList) -> list[bytes]:
        keys = keys_of(blocks)
        if not self._layout or blocks.layout != self._layout:
            raise WeftError(StatusCode.FAILED_PRECONDITION, "OTHER_LAYOUT", "this worker's blocks have another layout")
        return keys

    async def _messages(
        self, request: mesh.ReadBlocksRequest, rounding: Rounding | None
    ) -> AsyncIterator[mesh.ReadBlocksResponse]:
        loop, keys = asyncio.get_running_loop(), self._keys_of(request.blocks)
        found: asyncio.Queue[Sequence[BlockPart] | None] = asyncio.Queue()

        def answer(parts: Sequence[BlockPart] | None) -> None:
            loop.call_soon_threadsafe(found.put_nowait, parts)

        def seal(parts: Sequence[BlockPart]) -> list[bytes]:
            return [
                seal_block(keys[part.index], self._layout, part.contents, self._secret, rounding, part.offset)
                for part in parts
            ]

        read = BlockRead(keys, request.follow, answer, request.in_parts)
        self._engine.read_blocks(read)
        try:
            while (parts := await found.get()) is not None:
                messages = _pack(parts, await asyncio.to_thread(seal, parts))
                for place, message in enumerate(messages, 1):
                    message.more = place < len(messages) or not found.empty()
                    yield message
                read.sent_bytes += sum(len(part.contents) for part in parts)
                self.sent += sum(part.ends for part in parts)
                self._engine.wake()
        finally:
            read.cancelled = True


def _pack(parts: Sequence[BlockPart], frames: Sequence[bytes]) -> list[mesh.ReadBlocksResponse]:
    """As few messages as hold these frames, in their order."""
    messages: list[mesh.ReadBlocksResponse] = []
    room, kind = 0, (-1, False)
    for part, frame in zip(parts, frames, strict=True):
        for piece in pieces_of(part.index, frame):
            if len(piece.data) > room or kind != (part.offset, part.ends):
                messages.append(mesh.ReadBlocksResponse(offset=part.offset, partial=not part.ends))
                room, kind = MESSAGE_BYTES, (part.offset, part.ends)
            messages[-1].pieces.append(piece)
            room -= len(piece.data)
    return messages
