"""Vectors of texts, through the gateway's client of the cache: real gRPC, real Redis."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from protos import cache_pb2 as cache
from services.cache.counters import Miss
from services.gateway.links.cache_link import CacheLink
from services.gateway.links.recent_vectors import LIFE_S, RecentVectors
from services.gateway.links.vector_cache import VectorCache
from tests.cache.conftest import CacheDoor, Client, key_of

BUDGET_S = 10.0
"""Long: these tests are about counts, not about time."""
KEYS = [key_of(number) for number in range(256)]


def vector(number: int, size: int = 1536) -> bytes:
    """A vector unlike any other number's."""
    return number.to_bytes(4, "little") * (size // 4)


class PartlyLate(CacheLink):
    """A link whose first answer comes too late."""

    late = 1

    async def look_up(self, *request: Any) -> Any:
        answer = await super().look_up(*request)
        self.late -= 1
        return None if self.late == 0 else answer


@pytest_asyncio.fixture
async def link(door: CacheDoor) -> AsyncIterator[CacheLink]:
    """The gateway's link to the cache service."""
    link = PartlyLate(f"127.0.0.1:{door.port}", BUDGET_S)
    link.late = 0
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


async def test_a_late_answer_loses_its_own_vectors_alone(door: CacheDoor, link: PartlyLate) -> None:
    vectors = await store(door)
    link.late = 1
    found = await VectorCache(link).get(KEYS, 1536, "")
    assert 0 < len(found) < len(KEYS)
    assert found.items() <= vectors.items()


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
