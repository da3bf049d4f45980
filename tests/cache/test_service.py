"""The cache service over gRPC while Redis works."""

import asyncio
import os
import signal
import socket
import sys
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos import cache_pb2 as cache
from protos import inference_pb2 as api
from services import rpc
from services.cache.counters import Miss
from tests.cache.conftest import CacheDoor, Client, OpenDoor, key_of, result_of
from tests.ports import free_port
from tests.redis_server import RedisServer


async def test_a_stored_result_is_found(door: CacheDoor) -> None:
    whole = cache.CachedResult(
        token_ids=[1, 2, 3],
        finish_reason=api.FINISH_REASON_STOP,
        stop_token_id=0,
        logprobs=[api.PositionLogprobs(chosen=api.TokenLogprob(token_id=1, logprob=-0.5))] * 3,
    )
    assert await door.get(key_of(1)) is None
    assert await door.put(key_of(1), whole)
    assert await door.get(key_of(1)) == whole
    assert await door.get(key_of(2)) is None
    assert (door.counters.hits, door.counters.misses[Miss.ABSENT], door.counters.stores) == (1, 2, 1)


async def test_an_answer_of_no_tokens_is_a_hit(door: CacheDoor) -> None:
    assert await door.put(key_of(1), cache.CachedResult(finish_reason=api.FINISH_REASON_STOP))
    found = await door.get(key_of(1))
    assert found is not None
    assert not found.token_ids


async def test_a_second_result_replaces_the_first(door: CacheDoor) -> None:
    await door.put(key_of(1), result_of(1))
    await door.put(key_of(1), result_of(2, tokens=50))
    assert await door.get(key_of(1)) == result_of(2, tokens=50)


async def test_a_result_expires(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with open_door(redis_server.url, cache_ttl_s=0.2) as door:
        await door.put(key_of(1), result_of(1))
        assert await door.get(key_of(1)) is not None
        await asyncio.sleep(0.25)
        assert await door.get(key_of(1)) is None
        assert door.counters.misses[Miss.ABSENT] == 1


async def test_names_in_redis_hold_a_digest_and_values_a_frame(door: CacheDoor, client: Client) -> None:
    await door.put(key_of(1), result_of(1))
    names = {name.decode() for name in await client.keys()}
    assert names == {"weft:1:{result}:" + key_of(1).hex(), "weft:1:{result}:ledger"}
    value = await client.get(door.name(key_of(1)))
    assert value is not None
    assert value.startswith(b"WEFT\x01\x01")
    assert 0 < await client.pttl(door.name(key_of(1))) <= 86_400_000


@pytest.mark.parametrize("length", [0, 1, 31, 33, 1000])
async def test_a_malformed_key_is_refused(door: CacheDoor, length: int) -> None:
    for attempt in (door.get(bytes(length)), door.put(bytes(length), result_of(1))):
        with pytest.raises(aio.AioRpcError) as refused:
            await attempt
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(cast(grpc.Call, refused.value))
        assert status is not None
        assert b"INVALID_FIELD" in status.SerializeToString()
    assert sum(door.counters.summary().values()) == 0


@pytest.mark.parametrize(
    "reason", [api.FINISH_REASON_UNSPECIFIED, api.FINISH_REASON_CANCELLED, api.FINISH_REASON_ERROR]
)
async def test_an_incomplete_answer_is_refused(door: CacheDoor, reason: api.FinishReason.ValueType) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await door.put(key_of(1), cache.CachedResult(token_ids=[1], finish_reason=reason))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_malformed_bytes_are_refused(door: CacheDoor) -> None:
    async with rpc.link_channel(f"127.0.0.1:{door.port}") as channel:
        method: Any = channel.unary_unary("/weft.v1.Cache/GetResult")
        with pytest.raises(aio.AioRpcError) as refused:
            await method(b"\xff\xff\xff")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_concurrent_look_ups_find_all_values(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with open_door(redis_server.embedded.url) as door:
        assert all(await asyncio.gather(*(door.put(key_of(i), result_of(i)) for i in range(200))))
        assert await asyncio.gather(*(door.get(key_of(i)) for i in range(200))) == [result_of(i) for i in range(200)]


async def test_the_process_serves_without_redis_and_stops_on_sigterm() -> None:
    port = free_port()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{unused.getsockname()[1]}"
        environment = {**os.environ, "WEFT_REDIS_URL": url, "WEFT_LISTEN": f"127.0.0.1:{port}", "WEFT_DRAIN_S": "0"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cache", env=environment, stderr=asyncio.subprocess.PIPE
        )
        async with rpc.link_channel(f"127.0.0.1:{port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            question = health_pb2.HealthCheckRequest(service="weft.v1.Cache")
            answer = await health.Check(question, wait_for_ready=True, timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        _, logged = await process.communicate()
    assert process.returncode == 0
    assert b"redis is unavailable" in logged
    assert b"ConnectionError" in logged
    assert b"store closed" in logged
    assert b"secret" not in logged
