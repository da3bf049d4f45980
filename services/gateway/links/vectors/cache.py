"""The gateway's client of the cache of vectors. Knows keys and bytes, nothing of texts."""

from collections.abc import Iterator, Mapping, Sequence

from protos import cache_pb2
from services.gateway.links.cache_link import CacheLink
from services.gateway.links.vectors.look_ups import VectorLookUps
from services.gateway.links.vectors.recent import RecentVectors

_MOST_STORES = 64
"""Stores in flight; further vectors are dropped."""
_MOST_KEYS = 256
"""Keys of one call."""
_ANSWER_BYTES = 256 << 10
"""Bytes of vectors that one look-up asks for: Redis needs less than a millisecond for them, and a late answer loses no
others."""


class VectorCache:
    """Looks vectors up and stores them. Every failure is a miss."""

    def __init__(self, link: CacheLink, recent_bytes: int = 0) -> None:
        """recent_bytes: most bytes of the vectors that are kept here once they were found."""
        self._link, self._look_ups, self._recent = link, VectorLookUps(link), RecentVectors(recent_bytes)

    async def get(self, keys: Sequence[bytes], size: int, traceparent: str) -> dict[bytes, bytes]:
        """The vectors of `size` bytes that are found within the link's budget, by key."""
        found = self._recent.find(keys)
        missing = [key for key in keys if key not in found]
        most = max(1, min(_MOST_KEYS, _ANSWER_BYTES // size))
        parts = list(_parts(missing, most))
        answers = zip(parts, await self._look_ups.find(parts, traceparent), strict=True)
        pairs = (pair for part, vectors in answers for pair in zip(part, vectors, strict=False))
        looked_up = {key: vector for key, vector in pairs if len(vector) == size}
        self._recent.keep(looked_up)
        return found | looked_up

    def put(self, vectors: Mapping[bytes, bytes]) -> None:
        """Stores vectors in the background; drops them if too many stores are in flight."""
        for part in _parts(list(vectors), _MOST_KEYS):
            entries = [cache_pb2.StoredVector(key=key, data=vectors[key]) for key in part]
            request = cache_pb2.PutVectorsRequest(vectors=entries)
            self._link.store(lambda stub: stub.PutVectors, request, _MOST_STORES)


def _parts(keys: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    return (keys[start : start + most] for start in range(0, len(keys), most))
