"""The key of a prompt prefix, and the salt of tenants. Knows bytes, never where blocks are stored."""

import functools
import hashlib
from array import array
from collections.abc import Iterator, Sequence

KEY_BYTES = 32


def block_keys(token_ids: Sequence[int], block_size: int, root: bytes) -> Iterator[bytes]:
    """Yields the keys of the whole blocks of a sequence, first block first; a partial last block has no key.

    Each key is SHA-256(previous key, the block's tokens as little-endian uint32), so equal keys mean equal prefixes
    for one root.
    """
    key, tokens, width = root, array("I", token_ids).tobytes(), 4 * block_size
    for start in range(0, len(tokens) - width + 1, width):
        key = hashlib.sha256(key + tokens[start : start + width]).digest()
        yield key


@functools.lru_cache(maxsize=1024)
def chain_root(salt: bytes, fingerprint: bytes) -> bytes:
    """The root of the key chain for a tenant's salt and a model's fingerprint."""
    return digest(b"weft/prefix/1", salt, fingerprint)


def adapted(fingerprint: bytes, adapter: bytes) -> bytes:
    """The fingerprint of a model with an adapter on top of it; without one (empty) the model's own."""
    return digest(b"weft/adapted/1", fingerprint, adapter) if adapter else fingerprint


def digest(*parts: bytes) -> bytes:
    """SHA-256 over the parts, each preceded by its length, so that different lists of parts hash different bytes."""
    return hashlib.sha256(b"".join([len(part).to_bytes(8, "little") + part for part in parts])).digest()


def split_keys(joined: bytes) -> list[bytes]:
    """Splits keys that were joined to one byte string."""
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
