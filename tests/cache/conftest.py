"""A cache service on a real gRPC socket and a real Redis."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as redis
from pydantic import SecretStr

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc
from protos import inference_pb2 as api
from services import rpc
from services.cache.blocks import block_namespace
from services.cache.service import result_namespace, service
from services.cache.settings import CacheSettings
from services.cache.store import Store
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


class CacheDoor:
    """A client of a running cache service, with its counters and the names of its values in Redis."""

    def __init__(
        self,
        store: Store,
        blocks: Store,
        settings: CacheSettings,
        stub: "cache_pb2_grpc.CacheAsyncStub",
        port: int,
    ) -> None:
        self.store = store
        self.counters = store.counters
        self.block_counters = blocks.counters
        self.block_namespace = block_namespace(settings)
        self.namespace = result_namespace(settings)
        self.stub = stub
        self.port = port

    async def get(self, key: bytes) -> cache.CachedResult | None:
        """Looks a result up."""
        found = await self.stub.GetResult(cache.GetResultRequest(key=key))
        return found.result if found.HasField("result") else None

    async def put(self, key: bytes, result: cache.CachedResult) -> bool:
        """Stores a result."""
        return (await self.stub.PutResult(cache.PutResultRequest(key=key, result=result))).stored

    def name(self, key: bytes) -> str:
        """The name of the value of `key` in Redis."""
        return self.namespace.prefix + key.hex()


Client = Any
"""A redis.asyncio.Redis; its annotations cover several protocols at once and are of no use here."""

OpenDoor = Callable[..., AbstractAsyncContextManager[CacheDoor]]


# A test that is not about time uses long time-outs, so that it passes on a busy machine; others use the defaults.
LONG_TIMEOUTS = {"cache_budget_ms": 2000, "cache_store_budget_ms": 2000, "cache_connect_ms": 1000}
DEFAULT_TIMEOUTS = {"cache_budget_ms": 20, "cache_store_budget_ms": 100, "cache_connect_ms": 50}


@contextlib.asynccontextmanager
async def opened(url: str, port: int = 0, **settings: Any) -> AsyncIterator[CacheDoor]:
    """A cache service that stores its values in the Redis at `url`."""
    wanted = CacheSettings(redis_url=SecretStr(url), **{**LONG_TIMEOUTS, **settings})
    store, blocks = Store(url, wanted.timeouts()), Store(url, wanted.block_timeouts(), name="blocks")
    await store.open()
    await blocks.open()
    server = await rpc.serve(f"127.0.0.1:{port}", [service(store, blocks, wanted)])
    await server.ready()
    try:
        async with rpc.link_channel(f"127.0.0.1:{server.port}") as channel:
            await channel.channel_ready()
            yield CacheDoor(store, blocks, wanted, cache_pb2_grpc.CacheStub(channel), server.port)
    finally:
        await server.stop(0)
        await store.close()
        await blocks.close()


@pytest.fixture
def open_door() -> OpenDoor:
    """Starts a cache service with the test's own settings."""
    return opened


@pytest_asyncio.fixture
async def door(redis_server: RedisServer) -> AsyncIterator[CacheDoor]:
    """A cache service with long time-outs."""
    async with opened(redis_server.url) as door:
        yield door


@pytest_asyncio.fixture
async def hasty_door(redis_server: RedisServer) -> AsyncIterator[CacheDoor]:
    """A cache service with the default time-outs."""
    async with opened(redis_server.url, **DEFAULT_TIMEOUTS) as door:
        yield door


@pytest_asyncio.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Client]:
    """The test's own connection to the same Redis."""
    client = redis.Redis.from_url(redis_server.url, protocol=2)
    yield client
    await client.aclose()


def key_of(number: int) -> bytes:
    """A key like those of requests."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def result_of(number: int, tokens: int = 32) -> cache.CachedResult:
    """A result unlike any other number's."""
    token_ids = [(number * 7919 + i) % 32_000 for i in range(tokens)]
    return cache.CachedResult(token_ids=token_ids, finish_reason=api.FINISH_REASON_LENGTH)
