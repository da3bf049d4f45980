"""weft.v1.Cache over gRPC: checks what callers send, hands it to the store. Knows messages and shelves, never Redis."""

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc
from protos import inference_pb2 as api
from services.cache.blocks import BlockService, block_shelf
from services.cache.frames import Kind
from services.cache.settings import CacheSettings
from services.cache.store import Namespace, Store
from services.errors import invalid
from services.hashing import KEY_BYTES
from services.rpc import Service

NAME = "weft.v1.Cache"
Context = aio.ServicerContext[Any, Any]


def result_shelf(settings: CacheSettings) -> Namespace[cache.CachedResult]:
    """Where results of deterministic requests are kept."""
    return Namespace(
        name="result",
        kind=Kind.RESULT,
        parse=cache.CachedResult.FromString,
        max_bytes=settings.cache_result_bytes,
        max_value_bytes=settings.cache_value_bytes,
        ttl_s=settings.cache_ttl_s,
    )


class CacheService(cache_pb2_grpc.CacheServicer):
    """The servicer."""

    def __init__(self, store: Store, results: Namespace[cache.CachedResult], blocks: BlockService) -> None:
        self._store = store
        self._results = results
        self._blocks = blocks

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

    async def HasBlocks(self, request: cache.HasBlocksRequest, context: Context) -> cache.HasBlocksResponse:
        """Says how much of a prefix is stored. Raises WeftError for a malformed list."""
        return cache.HasBlocksResponse(stored=await self._blocks.stored(request.blocks))

    async def GetBlocks(
        self, request: cache.GetBlocksRequest, context: Context
    ) -> AsyncIterator[cache.GetBlocksResponse]:
        """The stored blocks of a prefix up to the first miss. Raises WeftError for a malformed list."""
        async for pieces in self._blocks.get(request.blocks):
            yield cache.GetBlocksResponse(pieces=pieces)

    async def PutBlocks(
        self, requests: AsyncIterator[cache.PutBlocksRequest], context: Context
    ) -> AsyncIterator[cache.PutBlocksResponse]:
        """Says which of the offered blocks are wanted, then takes them. Raises WeftError for what is malformed."""
        first = await anext(requests, cache.PutBlocksRequest())
        wanted = await self._blocks.wanted(first.blocks)
        yield cache.PutBlocksResponse(wanted=wanted)
        stored = await self._blocks.put(first.blocks, wanted, _pieces(requests))
        yield cache.PutBlocksResponse(stored=stored)


async def _pieces(requests: AsyncIterator[cache.PutBlocksRequest]) -> AsyncIterator[cache.BlockPiece]:
    async for request in requests:
        for piece in request.pieces:
            yield piece


def service(store: Store, blocks: Store, settings: CacheSettings) -> Service:
    """The servicer and where it belongs. KV blocks have a store, and so connections, of their own."""
    servicer = CacheService(store, result_shelf(settings), BlockService(blocks, block_shelf(settings)))
    return Service(NAME, cache_pb2_grpc.add_CacheServicer_to_server, servicer, traced=True)


def _checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise invalid("key", f"must be {KEY_BYTES} bytes")
    return key
