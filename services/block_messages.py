"""KV blocks in messages, between workers and the cache service: lists of keys, contents in pieces and in frames.

Knows bytes, not which numbers they are.
"""

from collections.abc import Iterator
from typing import Protocol

from protos import cache_pb2 as cache
from services import hashing
from services.errors import invalid
from services.security import frames

MESSAGE_BYTES = 1 << 20
"""Most bytes of block contents in one message."""
MOST_KEYS = 8192
"""Most blocks of one list."""
_ROUNDED = b"+fp8"  # at the end of the key of a frame: rounded contents are never taken for others


class Rounding(Protocol):
    """Rounds contents of blocks to fp8 for a link, and expands them behind it. Any thread may call it."""

    @property
    def rounded_bytes(self) -> int:
        """Bytes of the rounded contents of a block."""

    def round(self, contents: bytes, /) -> bytes:
        """From the pool's format to fp8; also those of some layers alone."""

    def expand(self, rounded: bytes, /) -> bytes:
        """From fp8 to the pool's format. Raises FrameError for what `round` has not made of finite numbers."""


def keys_of(blocks: cache.BlockList) -> list[bytes]:
    """The keys of a list of blocks. Raises WeftError for a malformed list."""
    count, rest = divmod(len(blocks.keys), hashing.KEY_BYTES)
    if rest or not 0 < count <= MOST_KEYS:
        raise invalid("blocks.keys", f"must be 1 to {MOST_KEYS} keys of {hashing.KEY_BYTES} bytes")
    return list(hashing.split_keys(blocks.keys))


def pieces_of(index: int, payload: bytes) -> Iterator[cache.BlockPiece]:
    """Splits the contents of the block at this place of a list into pieces that each fit into a message."""
    for start in range(0, len(payload), MESSAGE_BYTES):
        end = start + MESSAGE_BYTES
        yield cache.BlockPiece(index=index, data=payload[start:end], last=end >= len(payload))


def seal_block(
    key: bytes, layout: bytes, contents: bytes, secret: bytes, rounding: Rounding | None, offset: int = 0
) -> bytes:
    """The frame in which the contents of a block from `offset` on travel to another worker. rounding: rounds them
    first."""
    name = _name(key, layout, rounding, offset)
    return frames.seal(frames.Kind.BLOCK, name, rounding.round(contents) if rounding else contents, secret)


def unseal_block(
    key: bytes, layout: bytes, frame: bytes, secret: bytes, rounding: Rounding | None, offset: int = 0
) -> bytes:
    """The contents in the pool's format. Raises FrameError unless `seal_block` made the frame of such contents, from
    this offset on, and with a rounding where one is given."""
    contents = frames.unseal(frames.Kind.BLOCK, _name(key, layout, rounding, offset), frame, secret)
    return rounding.expand(contents) if rounding else contents


def _name(key: bytes, layout: bytes, rounding: Rounding | None, offset: int) -> bytes:
    """What a frame is sealed with, so that none is taken for one of another block, part or format."""
    return key + layout + (b"+%d" % offset if offset else b"") + (_ROUNDED if rounding else b"")
