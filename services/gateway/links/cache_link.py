"""The gateway's link to the cache service: calls within a time budget, stores in the background.

Every failure is a miss. Knows nothing of what is kept, or where.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import structlog
from grpc import ChannelConnectivity, aio

from protos import cache_pb2_grpc as cache_grpc
from protos import inference_pb2 as api
from services import rpc
from services.security import mesh_id as mesh_ids

Request = TypeVar("Request")
Reply = TypeVar("Reply")
if TYPE_CHECKING:  # The generated stubs have the asynchronous class in their types only.
    Method: TypeAlias = Callable[[cache_grpc.CacheAsyncStub], aio.UnaryUnaryMultiCallable[Request, Reply]]
    Streamed: TypeAlias = Callable[[cache_grpc.CacheAsyncStub], aio.StreamStreamMultiCallable[Request, Reply]]

log = structlog.get_logger("cache")

_STORE_S = 1.0
"""Deadline of one store."""


class CacheLink:
    """A connection to the cache service; without an address every look-up is a miss and nothing is stored."""

    def __init__(self, address: str, budget_s: float, mesh_id: str = "") -> None:
        self._metadata = mesh_ids.metadata(mesh_id)
        self._channel = rpc.link_channel(address, "cache") if address else None
        self._stub = cache_grpc.CacheStub(self._channel) if self._channel else None
        self.budget_s = budget_s
        self._stores: set[asyncio.Task[None]] = set()

    @property
    def enabled(self) -> bool:
        """A cache service is configured."""
        return self._stub is not None

    @property
    def state(self) -> "api.CacheState.ValueType":
        """The state of the connection to the cache service."""
        if self._channel is None:
            return api.CACHE_STATE_NONE
        # A channel that was never used is idle: this connects it, and a later call reports the outcome.
        state = self._channel.get_state(try_to_connect=True)
        if state in (ChannelConnectivity.IDLE, ChannelConnectivity.CONNECTING):
            return api.CACHE_STATE_UNSPECIFIED
        return api.CACHE_STATE_CONNECTED if state is ChannelConnectivity.READY else api.CACHE_STATE_DISCONNECTED

    async def look_up(self, method: "Method[Request, Reply]", request: Request, traceparent: str) -> Reply | None:
        """What the method of the stub answers, or None after at most the budget."""
        if self._stub is None:
            return None
        metadata = (("traceparent", traceparent), *self._metadata)
        try:
            return await method(self._stub)(request, timeout=self.budget_s, metadata=metadata)
        except aio.AioRpcError as error:
            log.debug("look-up failed", code=error.code().name)
            return None

    def stream(self, method: "Streamed[Request, Reply]", requests: AsyncIterator[Request]) -> AsyncIterator[Reply]:
        """The answers to a stream of requests, until one side ends it. Raises AioRpcError. There is an address."""
        assert self._stub is not None, "no address"
        return aiter(method(self._stub)(requests, metadata=self._metadata))

    def store(self, method: "Method[Request, Reply]", request: Request, most: int) -> None:
        """Sends a request in the background, or drops it beside `most` others in flight."""
        if self._stub is not None and len(self._stores) < most:
            task = asyncio.create_task(self._store(method(self._stub), request))
            self._stores.add(task)
            task.add_done_callback(self._stores.discard)

    async def close(self) -> None:
        """Waits for the stores in flight, at most one deadline."""
        await asyncio.gather(*self._stores, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def _store(self, call: "aio.UnaryUnaryMultiCallable[Request, Reply]", request: Request) -> None:
        try:
            await call(request, timeout=_STORE_S, metadata=self._metadata)
        except aio.AioRpcError as error:
            log.debug("not stored", code=error.code().name)
