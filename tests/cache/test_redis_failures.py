"""Whatever fails at Redis, a look-up is a miss within its time limit, and hits return when Redis does."""

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cache.counters import Miss
from services.cache.redis_client import CONNECTIONS
from services.security import frames
from services.security.frames import Kind
from tests.cache.conftest import DEFAULT_TIMEOUTS, CacheDoor, Client, OpenDoor, key_of, opened, result_of
from tests.cache.slow_proxy import SlowProxy
from tests.redis_server import RedisServer
from tests.timing import timely

TIMEOUT_S = 0.02
# Added to the time-out: the gRPC round trip, on a machine whose cores may be busy with other tests.
MARGIN_S = 0.04
# The interval of the breaker's probes, and the time of the one that succeeds.
BACK_S = 1.0 + 0.2


class Stalls:
    """Measures how long this process was not scheduled, by the excess time of its sleeps."""

    def __init__(self) -> None:
        self.total_s = 0.0

    async def __aenter__(self) -> "Stalls":
        self._watch = asyncio.create_task(self._watching())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def _watching(self) -> None:
        while True:
            start = time.perf_counter()
            try:
                await asyncio.sleep(0.002)
            finally:
                self.total_s += max(0.0, time.perf_counter() - start - 0.002)


async def timed(door: CacheDoor, key: bytes) -> float:
    """Seconds that a look-up took, which must be a miss."""
    async with Stalls() as stalls:
        start = time.perf_counter()
        assert await door.get(key) is None
        took = time.perf_counter() - start
    return took - stalls.total_s


async def until_open(door: CacheDoor) -> float:
    """Seconds of consecutive look-ups until the first that the open breaker answers."""
    times = [0.0]
    while not door.counters.misses[Miss.BREAKER]:
        times.append(await timed(door, key_of(1)))
    assert sorted(times)[len(times) // 2] < TIMEOUT_S + MARGIN_S
    return sum(times)


async def until_hit(door: CacheDoor, key: bytes) -> float:
    """Seconds until a look-up hits again."""
    start = time.perf_counter()
    while await door.get(key) is None:
        assert time.perf_counter() - start < 5.0
        await asyncio.sleep(0.005)
    return time.perf_counter() - start


async def damage_then_look(door: CacheDoor, client: Client, value: bytes) -> None:
    await client.set(door.name(key_of(1)), value)
    assert await door.get(key_of(1)) is None


async def test_damaged_values_are_counted_misses(door: CacheDoor, client: Client) -> None:
    await door.put(key_of(1), result_of(1))
    await door.put(key_of(2), result_of(2))
    good = await client.get(door.name(key_of(1)))
    swapped = await client.get(door.name(key_of(2)))
    damaged = [
        bytes([*good[:-1], good[-1] ^ 1]),
        good[:-1],
        good[: frames.HEADER_BYTES],
        good[:3],
        swapped,
        good + b"\0",
        b"not a frame at all, but long enough for one",
        bytes(5 << 20),
    ]
    for value in damaged:
        await damage_then_look(door, client, value)
    assert door.counters.misses == {Miss.CORRUPT: len(damaged)}
    assert await door.get(key_of(2)) == result_of(2)
    assert await door.put(key_of(1), result_of(1)), "a store replaces the damaged value"
    assert await door.get(key_of(1)) == result_of(1)


async def test_an_intact_frame_without_a_result_is_a_counted_miss(door: CacheDoor, client: Client) -> None:
    await damage_then_look(door, client, frames.seal(Kind.RESULT, key_of(1), b"\xff\xff no message"))
    assert door.counters.misses == {Miss.CORRUPT: 1}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_damaged_value_is_never_returned(door: CacheDoor, client: Client, data: st.DataObject) -> None:
    frame = bytearray(frames.seal(Kind.RESULT, key_of(1), result_of(1).SerializeToString()))
    for position in data.draw(st.sets(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[position] ^= data.draw(st.integers(1, 255))
    await damage_then_look(door, client, bytes(frame))


async def test_a_flushed_redis_is_a_miss_and_works_afterwards(door: CacheDoor, client: Client) -> None:
    await door.put(key_of(1), result_of(1))
    await client.flushall()
    await client.script_flush()
    assert await door.get(key_of(1)) is None
    assert await door.put(key_of(1), result_of(1))
    assert await door.get(key_of(1)) == result_of(1)


async def test_a_value_of_another_type_is_a_counted_miss_and_replaced(door: CacheDoor, client: Client) -> None:
    await client.rpush(door.name(key_of(1)), "a", "list")
    assert await door.get(key_of(1)) is None
    assert door.counters.misses == {Miss.CORRUPT: 1}
    assert await door.put(key_of(1), result_of(1))
    assert await door.get(key_of(1)) == result_of(1)


async def test_a_full_redis_refuses_stores_and_still_gives_hits(
    door: CacheDoor, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    await door.put(key_of(1), result_of(1))
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", "1")
    for refused in range(3):
        assert not await door.put(key_of(2), result_of(2))
        assert door.counters.refused == refused + 1
        assert await door.get(key_of(1)) == result_of(1)
    assert await door.get(key_of(2)) is None
    assert "".join(capfd.readouterr()).count("redis refused a command") == 1, "one line, not one for each store"
    await client.config_set("maxmemory", "0")
    assert await door.put(key_of(2), result_of(2))


@timely
async def test_a_killed_redis_is_a_miss_until_it_is_available_again(
    hasty_door: CacheDoor, redis_server: RedisServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for i in range(30):
        while not await hasty_door.put(key_of(i), result_of(i)):
            await until_hit(hasty_door, key_of(0))
    assert redis_server.kill() == -9
    assert await until_open(hasty_door) <= 0.25
    times = sorted([await timed(hasty_door, key_of(2)) for _ in range(200)])
    assert times[100] < 0.005, "an open breaker answers at once"
    assert not await hasty_door.put(key_of(99), result_of(99))
    redis_server.start()
    assert await until_hit(hasty_door, key_of(3)) < BACK_S
    for i in range(30):
        await until_hit(hasty_door, key_of(i))  # stored values survive the kill
    logged = "".join(capfd.readouterr())
    assert (logged.count("redis is unavailable"), logged.count("redis is available again")) == (1, 1)


async def test_connections_that_redis_closed_are_replaced_without_a_miss(door: CacheDoor, client: Client) -> None:
    assert await door.put(key_of(1), result_of(1))
    at_once = asyncio.gather(*(door.get(key_of(1)) for _ in range(2 * CONNECTIONS)))
    assert await at_once == [result_of(1)] * 2 * CONNECTIONS
    assert await client.client_kill_filter(_type="normal", skipme=True) > 1
    at_once = asyncio.gather(*(door.get(key_of(1)) for _ in range(2 * CONNECTIONS)))
    assert await at_once == [result_of(1)] * 2 * CONNECTIONS
    assert door.counters.misses.total() == 0


async def test_a_damaged_value_is_deleted_while_all_connections_are_kept(door: CacheDoor, client: Client) -> None:
    assert await door.put(key_of(1), result_of(1))
    await asyncio.gather(*(door.get(key_of(1)) for _ in range(2 * CONNECTIONS)))
    name = door.namespace.prefix + key_of(1).hex()
    await client.setrange(name, 40, b"damaged")
    assert await door.get(key_of(1)) is None
    assert await client.exists(name) == 0


@timely
async def test_the_open_breaker_permits_one_probe_per_second(hasty_door: CacheDoor, redis_server: RedisServer) -> None:
    redis_server.kill()
    await until_open(hasty_door)
    asked_before = hasty_door.counters.misses.total() - hasty_door.counters.misses[Miss.BREAKER]
    end = time.perf_counter() + 2.4
    while time.perf_counter() < end:
        await hasty_door.get(key_of(1))
        await asyncio.sleep(0.002)
    assert hasty_door.counters.misses.total() - hasty_door.counters.misses[Miss.BREAKER] - asked_before == 2


@timely
async def test_a_look_up_at_an_open_breaker_takes_less_than_a_millisecond(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, **DEFAULT_TIMEOUTS) as door:
        redis_server.kill()
        await until_open(door)
        times = []
        for _ in range(300):
            start = time.perf_counter()
            assert await door.store.get(door.namespace, key_of(1)) is None
            times.append(time.perf_counter() - start)
        assert sorted(times)[270] < 0.001


@timely
async def test_a_frozen_redis_costs_one_time_out_until_the_breaker_opens(
    hasty_door: CacheDoor, redis_server: RedisServer
) -> None:
    await hasty_door.put(key_of(1), result_of(1))
    redis_server.freeze()
    assert await until_open(hasty_door) <= 0.25
    assert hasty_door.counters.misses[Miss.TIMEOUT] >= 2
    redis_server.thaw()
    assert await until_hit(hasty_door, key_of(1)) < BACK_S


@timely
async def test_concurrent_look_ups_at_a_frozen_redis_share_the_wait(
    hasty_door: CacheDoor, redis_server: RedisServer
) -> None:
    redis_server.freeze()
    start = time.perf_counter()
    assert await asyncio.gather(*(hasty_door.get(key_of(i)) for i in range(100))) == [None] * 100
    # One after another they would take 2 s.
    assert time.perf_counter() - start < 1.0
    assert await until_open(hasty_door) <= 0.25


@timely
async def test_delays_of_the_event_loop_do_not_open_the_breaker(hasty_door: CacheDoor) -> None:
    async def look_up() -> None:
        await hasty_door.store.get(hasty_door.namespace, key_of(1))

    await hasty_door.put(key_of(1), result_of(1))
    for _ in range(10):
        look = asyncio.create_task(look_up())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.025)  # noqa: ASYNC251 (this is the delay)
        await look
    await asyncio.sleep(0.1)
    assert hasty_door.counters.misses[Miss.TIMEOUT] > 0
    assert await hasty_door.get(key_of(1)) == result_of(1)
    assert hasty_door.counters.misses[Miss.BREAKER] == 0


@timely
async def test_a_slow_redis_opens_the_breaker_and_is_used_again_later(
    redis_server: RedisServer, open_door: OpenDoor
) -> None:
    async with SlowProxy(redis_server.port) as proxy, open_door(proxy.url, **DEFAULT_TIMEOUTS) as door:
        await door.put(key_of(1), result_of(1))
        await until_hit(door, key_of(1))
        proxy.delay_s = 0.06
        assert await until_open(door) <= 0.25
        proxy.delay_s = 0.0
        assert await until_hit(door, key_of(1)) < BACK_S
        found = [await door.get(key_of(1)) for _ in range(50)]
        assert all(result in (result_of(1), None) for result in found), "no late answer was read by another command"


@timely
async def test_a_connection_that_takes_longer_than_a_look_up_serves_the_next(
    redis_server: RedisServer, open_door: OpenDoor, client: Client
) -> None:
    # In database 5 a new connection takes one round trip to choose it before the look-up's own.
    timeouts = {**DEFAULT_TIMEOUTS, "cache_budget_ms": 30}
    async with SlowProxy(redis_server.port) as proxy, open_door(proxy.url + "/5", **timeouts) as door:
        assert await door.put(key_of(1), result_of(1))
        await until_hit(door, key_of(1))
        proxy.delay_s = 0.02
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await door.get(key_of(1)) is None
        assert await until_hit(door, key_of(1)) < 0.2
        assert door.counters.misses[Miss.BREAKER] == 0


async def strand_all_connections(proxy: SlowProxy, door: CacheDoor) -> None:
    """All connections are open and idle, and die silently."""
    await door.put(key_of(1), result_of(1))
    await asyncio.gather(*(door.get(key_of(1)) for _ in range(100)))
    await until_hit(door, key_of(1))
    proxy.strand()


@timely
async def test_connections_that_died_silently_are_abandoned(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with SlowProxy(redis_server.port) as proxy, open_door(proxy.url, **DEFAULT_TIMEOUTS) as door:
        await strand_all_connections(proxy, door)
        found = await asyncio.gather(*(door.get(key_of(1)) for _ in range(100)))
        assert None in found
        assert await until_hit(door, key_of(1)) < BACK_S


@timely
async def test_idle_connections_that_died_silently_are_abandoned_with_the_first_one(
    redis_server: RedisServer, open_door: OpenDoor
) -> None:
    async with SlowProxy(redis_server.port) as proxy, open_door(proxy.url, **DEFAULT_TIMEOUTS) as door:
        await strand_all_connections(proxy, door)
        lost = 0
        while await door.get(key_of(1)) is None and lost < CONNECTIONS:
            lost += 1
            await asyncio.sleep(0.2)  # The time after which a command is given up, and more.
        assert 0 < lost < 4


async def until_hit_after_store(door: CacheDoor) -> float:
    start = time.perf_counter()
    while not await door.put(key_of(1), result_of(1)):
        await asyncio.sleep(0.01)
        await door.get(key_of(1))
        assert time.perf_counter() - start < 5.0
    return time.perf_counter() - start + await until_hit(door, key_of(1))


@timely
async def test_garbage_is_a_miss(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with SlowProxy(redis_server.port) as proxy:
        proxy.garbage = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        async with open_door(proxy.url, **DEFAULT_TIMEOUTS) as door:
            assert await timed(door, key_of(1)) < TIMEOUT_S + MARGIN_S
            assert not await door.put(key_of(1), result_of(1))
            proxy.garbage = b""
            await asyncio.sleep(1.0)
            assert await until_hit_after_store(door) < BACK_S


@timely
async def test_a_wrong_password_is_a_miss(tmp_path_factory: pytest.TempPathFactory, open_door: OpenDoor) -> None:
    with RedisServer(tmp_path_factory.mktemp("locked"), 64 << 20, "--requirepass", "right") as locked:
        for wrong in ("", ":wrong@", "nobody:wrong@"):
            async with open_door(locked.url.replace("//", f"//{wrong}"), **DEFAULT_TIMEOUTS) as door:
                assert await timed(door, key_of(1)) < TIMEOUT_S + MARGIN_S
                assert not await door.put(key_of(1), result_of(1))
                assert door.counters.hits == 0
        async with open_door(locked.url.replace("//", "//:right@")) as door:
            assert await door.put(key_of(1), result_of(1))
            assert await door.get(key_of(1)) == result_of(1)


async def test_options_in_the_url_cannot_change_decoding_and_retries(
    redis_server: RedisServer, open_door: OpenDoor
) -> None:
    async with open_door(redis_server.url + "?decode_responses=true&socket_timeout=30&retry_on_timeout=true") as door:
        assert await door.put(key_of(1), result_of(1))
        assert await door.get(key_of(1)) == result_of(1)


@timely
async def test_a_redis_that_starts_later_is_found(redis_server: RedisServer, open_door: OpenDoor) -> None:
    redis_server.stop()
    async with open_door(redis_server.url, **DEFAULT_TIMEOUTS) as door:
        assert await timed(door, key_of(1)) < MARGIN_S
        redis_server.start()
        assert await until_hit_after_store(door) < BACK_S + MARGIN_S
