"""Vectors of texts, through the gateway's client of the cache: real gRPC, real Redis."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from protos import cache_pb2 as cache
from services import rpc
from services.cache.counters import Miss
from services.gateway.links.cache_link import CacheLink
from services.gateway.links.vectors.cache import VectorCache
from services.gateway.links.vectors.recent import LIFE_S, RecentVectors
from tests.cache.conftest import CacheDoor, Client, OpenDoor, key_of
from tests.cache.slow_proxy import SlowProxy
from tests.redis_server import RedisServer

BUDGET_S = 10.0
"""Long: these tests are about counts, not about time."""
KEYS = [key_of(number) for number in range(256)]


def vector(number: int, size: int = 1536) -> bytes:
    """A vector unlike any other number's."""
    return number.to_bytes(4, "little") * (size // 4)


class Breaking(CacheLink):
    """A link whose streams lose their first answer, and break after the second."""

    async def stream(self, *request: Any) -> Any:
        answers = super().stream(*request)
        await anext(answers)
        yield await anext(answers)


@pytest_asyncio.fixture
async def link(door: CacheDoor) -> AsyncIterator[CacheLink]:
    """The gateway's link to the cache service."""
    link = CacheLink(f"127.0.0.1:{door.port}", BUDGET_S)
    yield link
    await link.close()


async def store(door: CacheDoor, size: int = 1536) -> dict[bytes, bytes]:
    """Stores a vector for each key."""
    vectors = {key: vector(number, size) for number, key in enumerate(KEYS)}
    entries = [cache.StoredVector(key=key, data=data) for key, data in vectors.items()]
    assert (await door.stub.PutVectors(cache.PutVectorsRequest(vectors=entries))).stored == len(KEYS)
    return vectors


async def scripts_run(client: Client) -> int:
    """How many scripts Redis has run."""
    stats = await client.info("commandstats")
    return sum(stats[name]["calls"] for name in ("cmdstat_eval", "cmdstat_evalsha") if name in stats)


@pytest.mark.parametrize(("size", "scripts"), [(4, 1), (1024, 1), (1536, 2), (16_384, 16)])
async def test_each_of_256_repeated_texts_is_a_hit_and_few_scripts_find_all(
    door: CacheDoor, client: Client, link: CacheLink, size: int, scripts: int
) -> None:
    vectors = await store(door, size)
    await VectorCache(link).get(KEYS[:1], size, "")  # Redis learns the script.
    before, hits = await scripts_run(client), door.counters.hits
    assert await VectorCache(link).get(KEYS, size, "") == vectors
    assert door.counters.hits - hits == len(KEYS)
    assert await scripts_run(client) - before == scripts


async def test_an_answer_that_is_lost_with_its_stream_loses_its_own_vectors_alone(door: CacheDoor) -> None:
    vectors, link = await store(door), Breaking(f"127.0.0.1:{door.port}", BUDGET_S)
    found = await VectorCache(link).get(KEYS, 1536, "")
    assert 0 < len(found) < len(KEYS)
    assert found.items() <= vectors.items()
    await link.close()


async def test_many_look_ups_share_a_stream_and_each_gets_its_own_vectors(door: CacheDoor, link: CacheLink) -> None:
    vectors, gateway = await store(door), VectorCache(link)
    wanted = [KEYS[start : start + 1 + start % 3] for start in range(200)]
    found = await asyncio.gather(*(gateway.get(keys, 1536, "") for keys in wanted))
    assert found == [{key: vectors[key] for key in keys} for keys in wanted]


async def test_a_look_up_that_ends_after_its_budget_is_a_miss_and_the_next_one_is_not(
    redis_server: RedisServer, open_door: OpenDoor
) -> None:
    async with SlowProxy(redis_server.port) as proxy, open_door(proxy.url) as door:
        vectors, link = await store(door), CacheLink(f"127.0.0.1:{door.port}", 0.5)
        gateway = VectorCache(link)
        proxy.delay_s = 1.0
        assert await gateway.get(KEYS[:1], 1536, "") == {}
        proxy.delay_s = 0.0
        assert await until_found(gateway, KEYS[:2]) == {key: vectors[key] for key in KEYS[:2]}
        await link.close()


async def test_look_ups_go_on_when_the_cache_service_is_back(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with open_door(redis_server.url) as door:
        vectors, port = await store(door), door.port
        link = CacheLink(f"127.0.0.1:{port}", BUDGET_S)
        gateway = VectorCache(link)
        assert await gateway.get(KEYS[:1], 1536, "") == {KEYS[0]: vectors[KEYS[0]]}
    assert await gateway.get(KEYS[:1], 1536, "") == {}, "at once, not after the budget"
    async with open_door(redis_server.url, port=port):
        assert await until_found(gateway, KEYS[:1]) == {KEYS[0]: vectors[KEYS[0]]}
    await link.close()


@pytest.mark.parametrize("second", [cache.LookUpVectorsRequest(keys=[b"short"]).SerializeToString(), b"\xff"], ids=str)
async def test_a_malformed_request_ends_the_stream_behind_the_answers_to_those_before(
    door: CacheDoor, second: bytes
) -> None:
    vectors = await store(door)

    async def requests() -> AsyncIterator[bytes]:
        yield cache.LookUpVectorsRequest(keys=KEYS[:1], number=1).SerializeToString()
        yield second

    async with rpc.link_channel(f"127.0.0.1:{door.port}") as channel:
        method: Any = channel.stream_stream("/weft.v1.Cache/LookUpVectors")
        answers = aiter(method(requests()))
        first = cache.LookUpVectorsResponse.FromString(await anext(answers))
        assert (first.number, list(first.vectors)) == (1, [vectors[KEYS[0]]])
        with pytest.raises(aio.AioRpcError) as refused:
            await anext(answers)
    assert refused.value.code() is StatusCode.INVALID_ARGUMENT


async def until_found(gateway: VectorCache, keys: list[bytes]) -> dict[bytes, bytes]:
    """The vectors, as soon as one look-up finds all."""
    for _ in range(1500):
        if len(found := await gateway.get(keys, 1536, "")) == len(keys):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("never found")


async def test_absent_damaged_and_foreign_values_are_misses_beside_the_hits(
    door: CacheDoor, client: Client, link: CacheLink
) -> None:
    vectors = await store(door)
    names = ["weft:1:{vector}:" + key.hex() for key in KEYS]
    await client.delete(names[0])
    await client.set(names[1], await client.get(names[2]))
    await client.delete(names[3])
    await client.rpush(names[3], "a", "list")
    await client.set(names[-1], bytes(5 << 20))
    misses = {KEYS[index] for index in (0, 1, 3, -1)}
    hits = {key: data for key, data in vectors.items() if key not in misses}
    assert await VectorCache(link).get(KEYS, 1536, "") == hits
    assert door.counters.misses == {Miss.ABSENT: 1, Miss.CORRUPT: 3}
    assert not await client.exists(names[1], names[3], names[-1]), "they would keep good ones from being stored"
    assert await VectorCache(link).get(KEYS, 1536, "") == hits
    assert door.counters.misses == {Miss.ABSENT: 5, Miss.CORRUPT: 3}


async def test_a_vector_that_was_found_needs_no_second_call(door: CacheDoor, client: Client, link: CacheLink) -> None:
    vectors, recent = await store(door), VectorCache(link, recent_bytes=3 * 1536)
    assert await recent.get(KEYS[:2], 1536, "") == {key: vectors[key] for key in KEYS[:2]}
    await client.flushall()
    assert await recent.get(KEYS[:3], 1536, "") == {key: vectors[key] for key in KEYS[:2]}, "the third was never found"
    assert await VectorCache(link).get(KEYS[:2], 1536, "") == {}, "without room none is kept"


def test_vectors_are_held_within_bytes_and_for_a_time() -> None:
    now = 0.0
    recent = RecentVectors(10, lambda: now)
    recent.keep({b"a": b"1234", b"b": b"5678"})
    assert recent.find([b"a", b"c"]) == {b"a": b"1234"}
    recent.keep({b"c": b"90123"})
    assert recent.find([b"a", b"b", b"c"]) == {b"a": b"1234", b"c": b"90123"}, "the one that was used least is gone"
    recent.keep({b"d": bytes(11)})
    assert recent.find([b"a", b"c", b"d"]) == {}, "the largest does not fit"
    recent.keep({b"a": b"1"})
    now = LIFE_S
    assert recent.find([b"a"]) == {}
