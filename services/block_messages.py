"""KV blocks in messages, between workers and the cache service: lists of keys, and contents in pieces."""

from collections.abc import Iterator

from protos import cache_pb2 as cache
from services import hashing
from services.errors import invalid

MESSAGE_BYTES = 1 << 20
"""Most bytes of block contents in one message."""
MOST_KEYS = 8192
"""Most blocks of one list."""


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
