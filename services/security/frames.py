"""The frame around a stored or sent value: detects damaged and exchanged values. Knows bytes, never what they mean.

A frame is magic (4 bytes), version (1), kind (1), payload length (4, big-endian), checksum (16), payload. The checksum
is BLAKE2b over the other parts and the key: an intact frame that was stored under another key is rejected. With a
secret it is keyed, a message authentication code: who writes to Redis without the secret can make no frame.
"""

import enum
import hashlib
import hmac
import struct

MAGIC = b"WEFT"
VERSION = 1
CHECKSUM_BYTES = 16

_HEAD = struct.Struct(">4sBBI")
HEADER_BYTES = _HEAD.size + CHECKSUM_BYTES


class Kind(enum.IntEnum):
    """What a frame contains."""

    RESULT = 1
    BLOCK = 2
    VECTOR = 3


class FrameError(Exception):
    """The bytes are not the frame that was stored under this key."""


def seal(kind: Kind, key: bytes, payload: bytes, secret: bytes = b"") -> bytes:
    """The frame to store under `key`. The payload must be smaller than 4 GiB, `secret` at most 64 bytes."""
    head = _HEAD.pack(MAGIC, VERSION, kind, len(payload))
    return head + _checksum(head, key, payload, secret) + payload


def unseal(kind: Kind, key: bytes, frame: bytes, secret: bytes = b"") -> bytes:
    """The payload of a frame found under `key`. Raises FrameError unless `seal` made it for the same arguments."""
    if len(frame) < HEADER_BYTES:
        raise FrameError("shorter than a header")
    head, payload = frame[: _HEAD.size], frame[HEADER_BYTES:]
    if head != _HEAD.pack(MAGIC, VERSION, kind, len(payload)):
        raise FrameError("another format, kind or length")
    if not hmac.compare_digest(frame[_HEAD.size : HEADER_BYTES], _checksum(head, key, payload, secret)):
        raise FrameError("damaged, forged, or stored under another key")
    return payload


def _checksum(head: bytes, key: bytes, payload: bytes, secret: bytes) -> bytes:
    # The head has a fixed length and the key's length precedes the key, so no two triples hash the same bytes.
    hasher = hashlib.blake2b(head, digest_size=CHECKSUM_BYTES, key=secret)
    hasher.update(len(key).to_bytes(4, "big"))
    hasher.update(key)
    hasher.update(payload)
    return hasher.digest()
