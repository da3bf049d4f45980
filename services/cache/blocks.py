"""KV blocks of prompts' prefixes: their names in the store, and their contents, joined from pieces.

Knows keys, layouts and bytes, never what a block means, nor Redis.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from protos import cache_pb2 as cache
from services.block_messages import MESSAGE_BYTES, keys_of, pieces_of
from services.cache.settings import CacheSettings
from services.cache.store import Namespace, Store
from services.errors import invalid
from services.security.frames import Kind

MOST_LAYOUT_BYTES = 64
VALUE_BYTES = 16 << 20
"""Most bytes of one block: 16 tokens of a 70B model in 16 bits are 5 MiB."""
_CONCURRENT = 4
"""Blocks that are read from Redis, or written to it, at the same time."""


def block_namespace(settings: CacheSettings) -> Namespace[bytes]:
    """The namespace of the contents of KV blocks."""
    return Namespace(
        name="block",
        kind=Kind.BLOCK,
        parse=bytes,
        max_bytes=settings.cache_block_bytes,
        max_value_bytes=VALUE_BYTES,
        ttl_s=settings.cache_ttl_s,
    )


def names_of(blocks: cache.BlockList) -> list[bytes]:
    """The names of blocks in the store: key and layout, joined. Raises WeftError for a malformed list."""
    keys = keys_of(blocks)
    if not 0 < len(blocks.layout) <= MOST_LAYOUT_BYTES:
        raise invalid("blocks.layout", f"must be 1 to {MOST_LAYOUT_BYTES} bytes")
    return [key + blocks.layout for key in keys]


class BlockService:
    """Stores and returns blocks."""

    def __init__(self, store: Store, namespace: Namespace[bytes]) -> None:
        self._store = store
        self._namespace = namespace

    async def stored(self, blocks: cache.BlockList) -> int:
        """The number of stored blocks before the first that is missing."""
        present = await self._store.present(self._namespace, names_of(blocks))
        return present.index(False) if False in present else len(present)

    async def get(self, blocks: cache.BlockList) -> AsyncIterator[list[cache.BlockPiece]]:
        """Yields the contents up to the first miss, in lists of pieces that fit into a message."""
        names = names_of(blocks)
        filled: list[cache.BlockPiece] = []
        room = MESSAGE_BYTES
        async for index, payload in self._read(names):
            for piece in pieces_of(index, payload):
                if len(piece.data) > room:
                    yield filled
                    filled, room = [], MESSAGE_BYTES
                filled.append(piece)
                room -= len(piece.data)
        if filled:
            yield filled
        # Reading in order made the first block the least recently used, but it must be evicted last.
        await self._store.present(self._namespace, names)

    async def wanted(self, blocks: cache.BlockList) -> list[int]:
        """The indices of the blocks that are not stored yet."""
        present = await self._store.present(self._namespace, names_of(blocks))
        return [index for index, there in enumerate(present) if not there]

    async def put(
        self, blocks: cache.BlockList, wanted: Sequence[int], pieces: AsyncIterator[cache.BlockPiece]
    ) -> list[int]:
        """Stores the blocks that arrive and returns their indices.

        Raises WeftError for pieces that are out of order, too large or not wanted.
        """
        names = names_of(blocks)
        stored: list[int] = []
        storing: set[asyncio.Task[None]] = set()

        async def store(index: int, payload: bytes) -> None:
            if await self._store.put(self._namespace, names[index], payload):
                stored.append(index)

        try:
            async for index, payload in _joined(set(wanted), pieces):
                storing.add(asyncio.create_task(store(index, payload)))
                if len(storing) >= _CONCURRENT:
                    _, storing = await asyncio.wait(storing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await asyncio.gather(*storing)
        await self._store.present(self._namespace, names)
        return sorted(stored)

    async def _read(self, names: list[bytes]) -> AsyncIterator[tuple[int, bytes]]:
        """Yields (index, contents) in order, up to the first miss; a few blocks are read in advance."""
        reading: deque[asyncio.Task[bytes | None]] = deque()
        try:
            for index in range(len(names)):
                while len(reading) < _CONCURRENT and index + len(reading) < len(names):
                    name = names[index + len(reading)]
                    reading.append(asyncio.create_task(self._look_up(name)))
                payload = await reading.popleft()
                if payload is None:
                    return
                yield index, payload
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _look_up(self, name: bytes) -> bytes | None:
        return await self._store.get(self._namespace, name)


async def _joined(wanted: set[int], pieces: AsyncIterator[cache.BlockPiece]) -> AsyncIterator[tuple[int, bytes]]:
    """Joins pieces to blocks and yields (index, contents) of each complete block. Raises WeftError."""
    index, parts, size = -1, list[bytes](), 0
    async for piece in pieces:
        if (parts and piece.index != index) or piece.index not in wanted:
            raise invalid(
                "pieces.index", "must be a wanted block that was not sent yet, and the block before it must be complete"
            )
        index = piece.index
        parts.append(piece.data)
        size += len(piece.data)
        if len(piece.data) > MESSAGE_BYTES or size > VALUE_BYTES:
            raise invalid("pieces.data", f"at most {MESSAGE_BYTES} bytes a piece and {VALUE_BYTES} bytes a block")
        if piece.last:
            wanted.discard(index)
            yield index, b"".join(parts)
            parts, size = [], 0
