"""KV blocks: prefixes are returned whole and in order, up to the first block that is missing or damaged."""

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
from grpc import aio

from protos import cache_pb2 as cache
from services.block_messages import MESSAGE_BYTES, pieces_of
from services.cache import lru_scripts
from services.cache.counters import Miss
from services.security.frames import HEADER_BYTES
from tests.cache.conftest import CacheDoor, Client, OpenDoor, key_of, result_of
from tests.redis_server import RedisServer
from tests.timing import timely

LAYOUT = b"float32/16/6x2x64/0of1"


def listed(numbers: Sequence[int], layout: bytes = LAYOUT) -> cache.BlockList:
    return cache.BlockList(keys=b"".join(map(key_of, numbers)), layout=layout)


def content(number: int, size: int = 6000) -> bytes:
    return random.Random(number).randbytes(size)


async def stored(door: CacheDoor, numbers: Sequence[int], layout: bytes = LAYOUT) -> int:
    return (await door.stub.HasBlocks(cache.HasBlocksRequest(blocks=listed(numbers, layout)))).stored


async def fetched(door: CacheDoor, numbers: Sequence[int], layout: bytes = LAYOUT) -> list[bytes]:
    """The contents that are returned, checked to be whole and in order."""
    contents: list[bytes] = []
    parts: list[bytes] = []
    async for response in door.stub.GetBlocks(cache.GetBlocksRequest(blocks=listed(numbers, layout))):
        assert sum(len(piece.data) for piece in response.pieces) <= MESSAGE_BYTES
        for piece in response.pieces:
            assert piece.index == len(contents)
            parts.append(piece.data)
            if piece.last:
                contents.append(b"".join(parts))
                parts = []
    assert not parts
    return contents


async def offered(
    door: CacheDoor, numbers: Sequence[int], size: int = 6000, layout: bytes = LAYOUT
) -> tuple[list[int], list[int]]:
    """The indices of wanted and of stored blocks."""
    call = door.stub.PutBlocks()
    await call.write(cache.PutBlocksRequest(blocks=listed(numbers, layout)))
    first = await call.read()
    assert isinstance(first, cache.PutBlocksResponse)
    for index in first.wanted:
        for piece in pieces_of(index, content(numbers[index], size)):
            await call.write(cache.PutBlocksRequest(pieces=[piece]))
    await call.done_writing()
    last = await call.read()
    assert isinstance(last, cache.PutBlocksResponse)
    return list(first.wanted), list(last.stored)


def name(door: CacheDoor, number: int, layout: bytes = LAYOUT) -> str:
    return door.block_namespace.prefix + (key_of(number) + layout).hex()


async def test_a_prefix_is_returned_whole_and_in_order(door: CacheDoor) -> None:
    numbers = list(range(300))
    assert await stored(door, numbers) == 0
    assert await offered(door, numbers) == (numbers, numbers)
    assert await stored(door, numbers) == 300
    assert await fetched(door, numbers) == [content(number) for number in numbers]
    assert (door.block_counters.hits, door.block_counters.stores) == (300, 300)
    assert (door.counters.hits, door.counters.stores) == (0, 0), "results have counters of their own"


async def test_a_block_larger_than_a_message_is_sent_in_pieces(door: CacheDoor) -> None:
    size = 2 * MESSAGE_BYTES + 12345
    assert await offered(door, [1, 2], size) == ([0, 1], [0, 1])
    assert await fetched(door, [1, 2]) == [content(1, size), content(2, size)]


async def test_only_missing_blocks_are_wanted(door: CacheDoor) -> None:
    await offered(door, [0, 1, 2])
    assert await offered(door, [0, 1, 2, 3, 4]) == ([3, 4], [3, 4])
    assert await offered(door, [0, 1, 2, 3, 4]) == ([], [])


async def test_a_prefix_ends_at_the_first_gap(door: CacheDoor, client: Client) -> None:
    await offered(door, range(10))
    await client.delete(name(door, 6))
    assert await stored(door, range(10)) == 6
    assert await fetched(door, range(10)) == [content(i) for i in range(6)]
    assert door.block_counters.misses[Miss.ABSENT] == 1


async def test_layouts_never_mix(door: CacheDoor) -> None:
    await offered(door, [1, 2])
    for other in (b"float16/16/6x2x64/0of1", LAYOUT[:-1], LAYOUT + b" "):
        assert await stored(door, [1, 2], other) == 0
        assert await fetched(door, [1, 2], other) == []


def flip(frame: bytes) -> bytes:
    position = random.Random(5).randrange(len(frame))
    return frame[:position] + bytes([frame[position] ^ 16]) + frame[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [flip, lambda frame: frame[:-1], lambda frame: frame[:HEADER_BYTES], lambda frame: frame + b"\0", lambda _: b"x"],
    ids=["flipped", "cut", "empty", "longer", "foreign"],
)
async def test_a_damaged_block_is_a_counted_miss_and_makes_room_for_a_good_one(
    door: CacheDoor, client: Client, damage: Callable[[bytes], bytes]
) -> None:
    await offered(door, range(5))
    await client.set(name(door, 3), damage(await client.get(name(door, 3))))
    assert await fetched(door, range(5)) == [content(i) for i in range(3)]
    assert door.block_counters.misses[Miss.CORRUPT] == 1
    assert await offered(door, range(5)) == ([3], [3])
    assert await fetched(door, range(5)) == [content(i) for i in range(5)]


async def test_swapped_blocks_are_misses(door: CacheDoor, client: Client) -> None:
    await offered(door, range(4))
    await offered(door, [7], layout=b"another")
    one, two = await client.get(name(door, 1)), await client.get(name(door, 2))
    await client.set(name(door, 1), two)
    assert await fetched(door, range(4)) == [content(0)]
    await client.set(name(door, 1), one)
    await client.set(name(door, 2), await client.get(name(door, 7, b"another")))
    assert await fetched(door, range(4)) == [content(0), content(1)]
    assert door.block_counters.misses[Miss.CORRUPT] == 2


async def test_the_bound_holds_and_last_blocks_are_evicted_before_first_ones(
    redis_server: RedisServer, client: Client, open_door: OpenDoor
) -> None:
    cost = 6000 + HEADER_BYTES + lru_scripts.ENTRY_BYTES
    async with open_door(redis_server.url, cache_block_bytes=10 * cost) as door:
        await door.put(key_of(1), result_of(1))
        await offered(door, range(8))
        assert len(await fetched(door, range(8))) == 8
        await offered(door, range(100, 106))
        assert await stored(door, range(100, 106)) == 6
        assert await stored(door, range(8)) == 4, "the first blocks of the older prefix remain"
        names = [
            found
            for found in await client.keys(door.block_namespace.prefix + "*")
            if found.decode() != door.block_namespace.index
        ]
        assert len(names) == 10
        assert door.block_counters.evictions == 4
        assert await door.get(key_of(1)) == result_of(1), "results have a bound of their own"


@pytest.mark.parametrize(
    "blocks",
    [
        cache.BlockList(),
        cache.BlockList(keys=bytes(31), layout=LAYOUT),
        cache.BlockList(keys=bytes(32)),
        cache.BlockList(keys=bytes(32), layout=bytes(65)),
        cache.BlockList(keys=bytes(32 * 8193), layout=LAYOUT),
    ],
)
async def test_malformed_lists_are_refused(door: CacheDoor, blocks: cache.BlockList) -> None:
    with pytest.raises(aio.AioRpcError) as has:
        await door.stub.HasBlocks(cache.HasBlocksRequest(blocks=blocks))
    with pytest.raises(aio.AioRpcError) as get:
        await door.stub.GetBlocks(cache.GetBlocksRequest(blocks=blocks)).read()
    call = door.stub.PutBlocks()
    await call.write(cache.PutBlocksRequest(blocks=blocks))
    with pytest.raises(aio.AioRpcError) as put:
        await call.read()
    assert {error.value.code().name for error in (has, get, put)} == {"INVALID_ARGUMENT"}


@pytest.mark.parametrize(
    "pieces",
    [
        [cache.BlockPiece(index=9, data=b"x", last=True)],
        [cache.BlockPiece(index=0, data=b"x", last=True)] * 2,
        [cache.BlockPiece(index=0, data=b"x"), cache.BlockPiece(index=1, data=b"y", last=True)],
        [cache.BlockPiece(index=0, data=bytes(MESSAGE_BYTES + 1), last=True)],
        [cache.BlockPiece(index=0, data=bytes(MESSAGE_BYTES))] * 17,
    ],
    ids=["not in the list", "twice", "mixed", "large piece", "large block"],
)
async def test_malformed_pieces_are_refused(door: CacheDoor, pieces: list[cache.BlockPiece]) -> None:
    call = door.stub.PutBlocks()
    await call.write(cache.PutBlocksRequest(blocks=listed([0, 1])))
    await call.read()
    with pytest.raises(aio.AioRpcError) as caught:  # noqa: PT012 - the refusal may come at any of them
        for piece in pieces:
            await call.write(cache.PutBlocksRequest(pieces=[piece]))
        await call.done_writing()
        await call.read()
    error = caught.value
    if isinstance(error, aio.AioRpcError):
        assert error.code().name == "INVALID_ARGUMENT"


async def test_an_offer_that_breaks_off_stores_whole_blocks_only(door: CacheDoor) -> None:
    call = door.stub.PutBlocks()
    await call.write(cache.PutBlocksRequest(blocks=listed([0, 1])))
    await call.read()
    await call.write(cache.PutBlocksRequest(pieces=pieces_of(0, content(0))))
    await call.write(cache.PutBlocksRequest(pieces=[cache.BlockPiece(index=1, data=content(1)[:100])]))
    await call.done_writing()
    last = await call.read()
    assert isinstance(last, cache.PutBlocksResponse)
    assert list(last.stored) == [0]
    assert await fetched(door, [0, 1]) == [content(0)]


async def test_without_redis_everything_is_a_miss(redis_server: RedisServer, hasty_door: CacheDoor) -> None:
    await offered(hasty_door, range(4))
    redis_server.kill()
    assert await stored(hasty_door, range(4)) == 0
    assert await fetched(hasty_door, range(4)) == []
    assert await offered(hasty_door, range(4)) == ([0, 1, 2, 3], [])


@timely
async def test_block_transfers_do_not_delay_results(door: CacheDoor) -> None:
    await door.put(key_of(1), result_of(1))
    numbers = list(range(64))
    await offered(door, numbers, 200_000)
    bulk = [asyncio.create_task(fetched(door, numbers)) for _ in range(4)]
    meanwhile = 0
    while not all(task.done() for task in bulk):
        assert await door.get(key_of(1)) == result_of(1)
        meanwhile += 1
    assert all(len(task.result()) == 64 for task in bulk)
    assert meanwhile > 4, f"{meanwhile} results were answered beside the transfers; 12 are usual"
