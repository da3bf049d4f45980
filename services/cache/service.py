"""weft.v1.Cache over gRPC: checks what callers send, hands it to the store. Knows messages and shelves, never Redis."""

from typing import Any

from grpc import aio

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc
from protos import inference_pb2 as api
from services.cache.frames import Kind
from services.cache.settings import CacheSettings
from services.cache.store import Shelf, Store
from services.errors import invalid
from services.hashing import KEY_BYTES
from services.rpc import Service

NAME = "weft.v1.Cache"
Context = aio.ServicerContext[Any, Any]


def result_shelf(settings: CacheSettings) -> Shelf[cache.CachedResult]:
    """Where results of deterministic requests are kept."""
    return Shelf(
        name="result",
        kind=Kind.RESULT,
        parse=cache.CachedResult.FromString,
        max_bytes=settings.cache_result_bytes,
        max_value_bytes=settings.cache_value_bytes,
        ttl_s=settings.cache_ttl_s,
    )


class CacheService(cache_pb2_grpc.CacheServicer):
    """The servicer."""

    def __init__(self, store: Store, results: Shelf[cache.CachedResult]) -> None:
        self._store = store
        self._results = results

    async def GetResult(self, request: cache.GetResultRequest, context: Context) -> cache.GetResultResponse:
        """Looks a result up. Raises WeftError for a malformed key."""
        result = await self._store.get(self._results, _checked_key(request.key))
        return cache.GetResultResponse(result=result)

    async def PutResult(self, request: cache.PutResultRequest, context: Context) -> cache.PutResultResponse:
        """Stores a result. Raises WeftError for a malformed key and for an answer that is not whole."""
        key = _checked_key(request.key)
        if request.result.finish_reason not in (api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH):
            raise invalid("result.finish_reason", "only answers that ended by themselves are kept")
        stored = await self._store.put(self._results, key, request.result.SerializeToString())
        return cache.PutResultResponse(stored=stored)


def service(store: Store, settings: CacheSettings) -> Service:
    """The servicer and where it belongs."""
    servicer = CacheService(store, result_shelf(settings))
    return Service(NAME, cache_pb2_grpc.add_CacheServicer_to_server, servicer, traced=True)


def _checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise invalid("key", f"must be {KEY_BYTES} bytes")
    return key
