"""The one prefix key of the mesh, and how tenants are salted. Knows bytes, never where they are stored."""

import functools
import hashlib
from array import array
from collections.abc import Iterator, Sequence

KEY_BYTES = 32


def block_keys(token_ids: Sequence[int], block_size: int, root: bytes) -> Iterator[bytes]:
    """Keys of the whole blocks of a sequence, first block first; a partial last block has none.

    Each key is SHA-256(previous key, the block's tokens as little-endian uint32), so equal keys mean equal prefixes
    under one root.
    """
    key, tokens, width = root, array("I", token_ids).tobytes(), 4 * block_size
    for start in range(0, len(tokens) - width + 1, width):
        key = hashlib.sha256(key + tokens[start : start + width]).digest()
        yield key


@functools.lru_cache(maxsize=1024)
def chain_root(salt: bytes, fingerprint: bytes) -> bytes:
    """Where the chain of one tenant's salt and one model's fingerprint begins."""
    return digest(b"weft/prefix/1", salt, fingerprint)


def digest(*parts: bytes) -> bytes:
    """SHA-256 over parts, each preceded by its length, so that no two lists of parts collide."""
    return hashlib.sha256(b"".join([len(part).to_bytes(8, "little") + part for part in parts])).digest()


def split_keys(joined: bytes) -> list[bytes]:
    """Keys that were sent as one byte string."""
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
