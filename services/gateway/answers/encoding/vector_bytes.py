"""Vectors as messages of the public API and as bytes of float32, little-endian. Knows no texts.

The bytes are those that protobuf writes. To convert 1,024 numbers one by one takes 30 times as long as to parse them.
"""

from array import array
from functools import lru_cache

from protos import inference_pb2 as api

_FLOAT_BYTES = 4


def embedding_of(vector: bytes) -> api.Embedding:
    """The message of a vector of at least one number."""
    return api.Embedding.FromString(_before_numbers(len(vector)) + vector)


def bytes_of(embedding: api.Embedding) -> bytes:
    """The numbers of a message."""
    return embedding.SerializeToString()[-_FLOAT_BYTES * len(embedding.values) :]


@lru_cache
def _before_numbers(length: int) -> bytes:
    """What precedes the numbers of a vector of so many bytes in its serialized message."""
    return api.Embedding(values=array("f", bytes(length))).SerializeToString()[:-length]
