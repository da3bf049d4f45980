"""The gRPC servicer of weft.v1.Cache: checks requests and passes them to the store. Knows messages, never Redis."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from grpc import aio

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc
from protos import inference_pb2 as api
from services import telemetry
from services.cache.blocks import BlockService, block_namespace
from services.cache.settings import CacheSettings
from services.cache.store import Namespace, Store
from services.errors import WeftError, invalid
from services.hashing import KEY_BYTES
from services.rpc import Service
from services.security.frames import Kind

NAME = "weft.v1.Cache"
Context = aio.ServicerContext[Any, Any]
_MOST_VECTORS = 256
_FLOAT_BYTES = 4
_Entry = TypeVar("_Entry")


def result_namespace(settings: CacheSettings) -> Namespace[cache.CachedResult]:
    """The namespace of the results of deterministic requests."""
    return Namespace(
        name="result",
        kind=Kind.RESULT,
        parse=cache.CachedResult.FromString,
        max_bytes=settings.cache_result_bytes,
        max_value_bytes=settings.cache_value_bytes,
        ttl_s=settings.cache_ttl_s,
    )


def vector_namespace(settings: CacheSettings) -> Namespace[bytes]:
    """The namespace of the vectors of texts."""
    return Namespace(
        name="vector",
        kind=Kind.VECTOR,
        parse=_checked_vector,
        max_bytes=settings.cache_vector_bytes,
        max_value_bytes=settings.cache_value_bytes,
        ttl_s=settings.cache_ttl_s,
    )


class CacheService(cache_pb2_grpc.CacheServicer):
    """`weft.v1.Cache` over a store of results and one of blocks."""

    def __init__(
        self,
        store: Store,
        results: Namespace[cache.CachedResult],
        blocks: BlockService,
        vectors: Namespace[bytes],
    ) -> None:
        self._store = store
        self._results = results
        self._blocks = blocks
        self._vectors = vectors

    async def GetResult(self, request: cache.GetResultRequest, context: Context) -> cache.GetResultResponse:
        """Returns a stored result. Raises WeftError for a malformed key."""
        result = await self._store.get(self._results, _checked_key(request.key))
        return cache.GetResultResponse(result=result)

    async def PutResult(self, request: cache.PutResultRequest, context: Context) -> cache.PutResultResponse:
        """Stores a result. Raises WeftError for a malformed key and for an incomplete answer."""
        key = _checked_key(request.key)
        if request.result.finish_reason not in (api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH):
            raise invalid("result.finish_reason", "must be STOP or LENGTH: only complete answers are stored")
        stored = await self._store.put(self._results, key, request.result.SerializeToString())
        return cache.PutResultResponse(stored=stored)

    async def HasBlocks(self, request: cache.HasBlocksRequest, context: Context) -> cache.HasBlocksResponse:
        """Returns how many leading blocks of a prefix are stored. Raises WeftError for a malformed list."""
        return cache.HasBlocksResponse(stored=await self._blocks.stored(request.blocks))

    async def GetBlocks(
        self, request: cache.GetBlocksRequest, context: Context
    ) -> AsyncIterator[cache.GetBlocksResponse]:
        """Sends the stored blocks of a prefix up to the first miss. Raises WeftError for a malformed list."""
        async for pieces in self._blocks.get(request.blocks):
            yield cache.GetBlocksResponse(pieces=pieces)

    async def PutBlocks(
        self, requests: AsyncIterator[cache.PutBlocksRequest], context: Context
    ) -> AsyncIterator[cache.PutBlocksResponse]:
        """Answers which of the offered blocks are wanted, then stores them. Raises WeftError for malformed messages."""
        first = await anext(requests, cache.PutBlocksRequest())
        wanted = await self._blocks.wanted(first.blocks)
        yield cache.PutBlocksResponse(wanted=wanted)
        stored = await self._blocks.put(first.blocks, wanted, _pieces(requests))
        yield cache.PutBlocksResponse(stored=stored)

    async def LookUpVectors(  # type: ignore[override]
        self, requests: AsyncIterator[cache.LookUpVectorsRequest], context: Context
    ) -> None:
        """Answers each request when its vectors are there, all looked up at once. Raises WeftError for malformed keys,
        after the answers to the requests before."""
        writing, refused = asyncio.Lock(), None
        async with asyncio.TaskGroup() as answers:
            try:  # In here, because a group of tasks would wrap the error.
                async for request in requests:
                    keys = [_checked_key(key) for key in _checked_count("keys", request.keys)]
                    answers.create_task(self._answer(request, keys, context, writing))
            except WeftError as error:
                refused = error
        if refused is not None:
            raise refused

    async def _answer(
        self, request: cache.LookUpVectorsRequest, keys: Sequence[bytes], context: Context, writing: asyncio.Lock
    ) -> None:
        with telemetry.start(f"{NAME}/LookUpVectors", request.traceparent, kind="server"):
            found = await self._store.get_all(self._vectors, keys)
        response = cache.LookUpVectorsResponse(number=request.number, vectors=[vector or b"" for vector in found])
        async with writing:  # gRPC writes one message at a time.
            await context.write(response)

    async def PutVectors(self, request: cache.PutVectorsRequest, context: Context) -> cache.PutVectorsResponse:
        """Stores vectors, all at once. Raises WeftError for a malformed key or vector."""
        entries = [(_checked_key(each.key), each.data) for each in _checked_count("vectors", request.vectors)]
        if any(not data or len(data) % _FLOAT_BYTES for _, data in entries):
            raise invalid("vectors.data", "must be whole numbers of float32, at least one")
        return cache.PutVectorsResponse(stored=await self._store.put_all(self._vectors, entries))


async def _pieces(requests: AsyncIterator[cache.PutBlocksRequest]) -> AsyncIterator[cache.BlockPiece]:
    async for request in requests:
        for piece in request.pieces:
            yield piece


def service(store: Store, blocks: Store, settings: CacheSettings) -> Service:
    """The servicer, and its entry for `rpc.serve`. KV blocks have their own store and so their own connections."""
    servicer = CacheService(
        store,
        result_namespace(settings),
        BlockService(blocks, block_namespace(settings)),
        vector_namespace(settings),
    )
    return Service(NAME, cache_pb2_grpc.add_CacheServicer_to_server, servicer, traced=True)


def _checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise invalid("key", f"must be {KEY_BYTES} bytes")
    return key


def _checked_count(field: str, entries: Sequence[_Entry]) -> Sequence[_Entry]:
    if len(entries) > _MOST_VECTORS:
        raise invalid(field, f"at most {_MOST_VECTORS}")
    return entries


def _checked_vector(data: bytes) -> bytes:
    """A stored vector as it is. Raises ValueError for what is none."""
    if not data or len(data) % _FLOAT_BYTES:
        raise ValueError("not whole numbers of float32")
    return data
