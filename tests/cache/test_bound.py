"""A namespace stays within its bound in a Redis whose configuration is not changed."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import redis.asyncio as redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cache import lru_scripts
from services.cache.redis_client import Timeouts
from services.cache.store import Namespace, Store
from services.security.frames import HEADER_BYTES, Kind
from tests.cache.conftest import CacheDoor, Client, OpenDoor, key_of, result_of
from tests.redis_server import RedisServer
from tests.timing import timely

LONG_TIMEOUTS = Timeouts(look_up_s=60.0, store_s=60.0, connect_s=60.0)


async def accounted(client: Client, namespace: Namespace[Any]) -> int:
    """The total in the LRU index, checked against the sum of its entries."""
    entries = await client.zrange(namespace.index, 0, -1, withscores=True)
    assert entries[0][0] == b"", "the total comes first"
    total = -int(entries[0][1])
    assert total == sum(int(name.rpartition(b":")[2]) + lru_scripts.ENTRY_BYTES for name, _ in entries[1:])
    return total


async def held(client: Client, namespace: Namespace[Any]) -> int:
    """The bytes of the values that exist, counted as the LRU index counts them."""
    names = [name for name in await client.keys(namespace.prefix + "*") if name.decode() != namespace.index]
    return sum([await client.strlen(name) + lru_scripts.ENTRY_BYTES for name in names])


def namespace_of(max_bytes: int, ttl_s: float = 1000.0) -> Namespace[bytes]:
    return Namespace("test", Kind.RESULT, bytes, max_bytes, 10_000, ttl_s)


def cost(payload: bytes) -> int:
    return len(payload) + HEADER_BYTES + lru_scripts.ENTRY_BYTES


async def test_the_least_recently_used_are_evicted_first(redis_server: RedisServer, open_door: OpenDoor) -> None:
    one = cost(result_of(1).SerializeToString())
    async with open_door(redis_server.url, cache_result_bytes=10 * one + one // 2) as door:
        for i in range(10):
            assert await door.put(key_of(i), result_of(1))
        for used_again in (0, 3):
            assert await door.get(key_of(used_again)) is not None
        for i in range(10, 14):
            assert await door.put(key_of(i), result_of(1))
        kept = [i for i in range(14) if await door.get(key_of(i)) is not None]
        assert kept == [0, 3, 6, 7, 8, 9, 10, 11, 12, 13]
        assert door.counters.evictions == 4


async def test_the_bound_holds_under_many_stores(redis_server: RedisServer, client: Client) -> None:
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(100_000)
    for start in range(0, 2000, 200):
        numbers = range(start, start + 200)
        payloads = [bytes(i * 37 % 3000) for i in numbers]
        assert all(await asyncio.gather(*map(store.put, [namespace] * 200, map(key_of, numbers), payloads)))
        total = await accounted(client, namespace)
        assert total == await held(client, namespace) <= namespace.max_bytes
    assert total > namespace.max_bytes - 3500
    assert store.counters.stores == 2000
    entries = await client.zcard(namespace.index) - 1
    assert store.counters.evictions == 2000 - entries
    await store.close()


async def test_the_memory_that_redis_uses_is_within_the_bound(redis_server: RedisServer, client: Client) -> None:
    store, namespace = Store(redis_server.embedded.url, LONG_TIMEOUTS), namespace_of(2_000_000)
    await store.open()
    await store.put(namespace, key_of(0), b"")
    before = (await client.info("memory"))["used_memory_dataset"]
    for start in range(0, 6000, 500):
        await asyncio.gather(*(store.put(namespace, key_of(i), bytes(150)) for i in range(start, start + 500)))
    assert store.counters.evictions > 0
    assert (await client.info("memory"))["used_memory_dataset"] - before < namespace.max_bytes
    await store.close()


async def test_one_script_stores_all_values_of_a_call_but_those_beyond_their_bound(
    redis_server: RedisServer, client: Client
) -> None:
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(20 * cost(bytes(100)))
    await store.put(namespace, key_of(0), b"")  # Redis learns the script.
    before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    entries = [(key_of(i), bytes(100 if i % 3 else 10_001)) for i in range(60)]
    assert await store.put_all(namespace, entries) == 40
    assert (await client.info("commandstats"))["cmdstat_evalsha"]["calls"] - before == 1
    assert (store.counters.stores, store.counters.refused, store.counters.evictions) == (41, 20, 21)
    assert await accounted(client, namespace) == await held(client, namespace) == namespace.max_bytes
    assert await store.put_all(namespace, []) == 0
    await store.close()


async def test_a_value_beyond_its_own_bound_is_refused(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with open_door(redis_server.url, cache_value_bytes=1000) as door:
        assert not await door.put(key_of(1), result_of(1, tokens=2000))
        assert await door.put(key_of(2), result_of(2, tokens=100))
        assert (door.counters.refused, door.counters.stores) == (1, 1)
    async with open_door(redis_server.url, cache_result_bytes=500) as door:
        assert not await door.put(key_of(1), result_of(1, tokens=300))


async def test_the_largest_value_is_stored_and_found(redis_server: RedisServer) -> None:
    store = Store(redis_server.url, LONG_TIMEOUTS)
    namespace = Namespace("test", Kind.RESULT, bytes, 64 << 20, 1 << 20, 1000.0)
    assert await store.put(namespace, key_of(1), bytes(1 << 20))
    assert await store.get(namespace, key_of(1)) == bytes(1 << 20)
    assert not await store.put(namespace, key_of(2), bytes((1 << 20) + 1))
    await store.close()


@timely
async def test_expired_values_do_not_stay_in_the_index(redis_server: RedisServer, client: Client) -> None:
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(1_000_000, ttl_s=0.2)
    for i in range(20):
        await store.put(namespace, key_of(i), bytes(100))
    for _ in range(6):
        await asyncio.sleep(0.06)
        await store.put(namespace, key_of(100), bytes(100))
    assert await accounted(client, namespace) == await held(client, namespace) == cost(bytes(100))
    assert store.counters.evictions == 0
    await asyncio.sleep(0.25)
    assert await client.keys() == [], "no key outlives its time to live, not even the index"
    await store.close()


async def test_values_that_redis_evicted_stop_counting(redis_server: RedisServer, client: Client) -> None:
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(10 * cost(bytes(100)))
    for i in range(10):
        await store.put(namespace, key_of(i), bytes(100))
    for i in range(10):
        await client.delete(namespace.prefix + key_of(i).hex())
    for i in range(10, 20):
        await store.put(namespace, key_of(i), bytes(100))
    assert await held(client, namespace) == await accounted(client, namespace) == namespace.max_bytes
    assert store.counters.evictions == 0, "values that no longer existed were not evicted"
    await store.close()


async def test_values_missing_in_a_lost_index_are_added_when_they_are_used(
    redis_server: RedisServer, client: Client
) -> None:
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(1_000_000)
    for i in range(4):
        await store.put(namespace, key_of(i), bytes(100))
    await client.delete(namespace.index)
    for i in range(4):
        assert await store.get(namespace, key_of(i)) == bytes(100)
    assert await accounted(client, namespace) == 4 * cost(bytes(100))
    await store.close()


@pytest.mark.parametrize("lost", [[], [1, 2], range(4)])
async def test_present_adds_exactly_the_entries_that_the_index_lost(
    redis_server: RedisServer, client: Client, lost: Sequence[int]
) -> None:
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(1_000_000)
    index_name, values = namespace.index, [bytes(100 + number) for number in range(4)]
    for number, value in enumerate(values):
        await store.put(namespace, key_of(number), value)
    for number in lost:
        size = len(values[number]) + HEADER_BYTES
        await client.zrem(index_name, f"{key_of(number).hex()}:{size}")
        await client.zincrby(index_name, size + lru_scripts.ENTRY_BYTES, "")
    assert await store.present(namespace, list(map(key_of, range(5)))) == [True] * 4 + [False]
    assert await accounted(client, namespace) == sum(map(cost, values))
    oldest_first = [name.partition(b":")[0].decode() for name in await client.zrange(index_name, 1, -1)]
    assert oldest_first == [key_of(number).hex() for number in (3, 2, 1, 0)]
    await store.close()


async def test_a_smaller_bound_is_reached_at_the_next_store(redis_server: RedisServer, client: Client) -> None:
    store = Store(redis_server.url, LONG_TIMEOUTS)
    for i in range(50):
        await store.put(namespace_of(1_000_000), key_of(i), bytes(100))
    await store.put(namespace_of(3 * cost(bytes(100))), key_of(50), bytes(100))
    assert await accounted(client, namespace_of(1)) == 3 * cost(bytes(100))
    await store.close()


def histories(*kinds: str) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 12), st.integers(0, 400)), max_size=60)


steps = (
    histories("put", "put all", "get", "get all", "ask")
    | histories("put", "put all", "get", "get all", "ask", "lose")
    | histories("put", "put all", "get", "get all", "ask", "lose", "forget")
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
async def test_the_total_in_the_index_is_always_correct(
    redis_server: RedisServer, steps: list[tuple[str, int, int]]
) -> None:
    client: Client = redis.Redis.from_url(redis_server.url, protocol=2)
    await client.flushall()
    store, namespace = Store(redis_server.url, LONG_TIMEOUTS), namespace_of(3000)
    latest: dict[int, bytes] = {}
    disturbed = {step for step, *_ in steps} & {"lose", "forget"}
    for step, number, size in steps:
        if step == "put":
            latest[number] = bytes([number]) * size
            assert await store.put(namespace, key_of(number), latest[number])
        elif step == "put all":
            some = {key: bytes([number, key]) * (size // 4 + key) for key in range(number)}
            latest |= some
            assert await store.put_all(namespace, [(key_of(key), value) for key, value in some.items()]) == number
        elif step == "get":
            assert await store.get(namespace, key_of(number)) in (None, latest.get(number))
        elif step == "get all":
            found = await store.get_all(namespace, list(map(key_of, range(13))))
            assert all(value in (None, latest.get(asked)) for asked, value in enumerate(found))
        elif step == "ask":
            there = [bool(await client.exists(namespace.prefix + key_of(asked).hex())) for asked in range(13)]
            assert await store.present(namespace, list(map(key_of, range(13)))) == there
        elif step == "lose":
            await client.delete(namespace.prefix + key_of(number).hex())
        else:
            await client.delete(namespace.index)
        if await client.exists(namespace.index):
            total = await accounted(client, namespace)
            if step == "put" or (step == "put all" and number):
                assert total <= namespace.max_bytes
            if not disturbed & {"forget"}:
                assert await held(client, namespace) <= total
            if not disturbed:
                assert await held(client, namespace) == total
    await store.close()
    await client.aclose()


@pytest.mark.parametrize("wrong", ["set", "lpush"])
async def test_an_index_of_another_type_is_replaced(door: CacheDoor, client: Client, wrong: str) -> None:
    await client.execute_command(wrong, door.namespace.index, "nonsense")
    assert await door.put(key_of(1), result_of(1))
    assert await accounted(client, door.namespace) > 0
    assert await door.get(key_of(1)) == result_of(1)
