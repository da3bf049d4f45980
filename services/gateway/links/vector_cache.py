"""The gateway's client of the cache of vectors: look-ups within a time budget, stores in the background.

Every failure is a miss. Knows keys and bytes, nothing of texts.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import structlog
from grpc import aio

from protos import cache_pb2
from protos import cache_pb2_grpc as cache_grpc
from services import rpc
from services.security import mesh_id as mesh_ids

log = structlog.get_logger("vectors")

_STORE_S = 1.0
"""Deadline of one store."""
_MOST_STORES = 64
"""Stores in flight; further vectors are dropped."""
_MOST_KEYS = 256


class VectorCache:
    """The client of the cache service; without an address every look-up is a miss."""

    def __init__(self, address: str, budget_s: float, mesh_id: str = "") -> None:
        self._metadata = mesh_ids.metadata(mesh_id)
        self._channel = rpc.link_channel(address, "cache") if address else None
        self._cache = cache_grpc.CacheStub(self._channel) if self._channel else None
        self._budget_s = budget_s
        self._stores: set[asyncio.Task[None]] = set()

    async def get(self, keys: Sequence[bytes], size: int, traceparent: str) -> dict[bytes, bytes]:
        """The vectors of `size` bytes that are found in `budget_s` seconds, by key."""
        if self._cache is None:
            return {}
        metadata = (("traceparent", traceparent), *self._metadata)
        parts = await asyncio.gather(*(self._get(self._cache, part, metadata) for part in _parts(keys)))
        found = {key: vector for part in parts for key, vector in part.items()}
        return {key: vector for key, vector in found.items() if len(vector) == size}

    async def _get(
        self, cache: "cache_grpc.CacheAsyncStub", keys: Sequence[bytes], metadata: tuple[tuple[str, str], ...]
    ) -> dict[bytes, bytes]:
        try:
            request = cache_pb2.GetVectorsRequest(keys=keys)
            reply = await cache.GetVectors(request, timeout=self._budget_s, metadata=metadata)
        except aio.AioRpcError as error:
            log.debug("look-up failed", code=error.code().name)
            return {}
        return dict(zip(keys, reply.vectors, strict=False))

    def put(self, vectors: Mapping[bytes, bytes]) -> None:
        """Stores vectors in the background; drops them if too many stores are in flight."""
        if self._cache is None:
            return
        for part in _parts(list(vectors)):
            if len(self._stores) < _MOST_STORES:
                entries = [cache_pb2.StoredVector(key=key, data=vectors[key]) for key in part]
                task = asyncio.create_task(self._put(self._cache, cache_pb2.PutVectorsRequest(vectors=entries)))
                self._stores.add(task)
                task.add_done_callback(self._stores.discard)

    async def _put(self, cache: "cache_grpc.CacheAsyncStub", request: cache_pb2.PutVectorsRequest) -> None:
        try:
            await cache.PutVectors(request, timeout=_STORE_S, metadata=self._metadata)
        except aio.AioRpcError as error:
            log.debug("not stored", code=error.code().name)

    async def close(self) -> None:
        """Waits for the stores in flight, at most one deadline."""
        await asyncio.gather(*self._stores, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[start : start + _MOST_KEYS] for start in range(0, len(keys), _MOST_KEYS))
