"""Copies of blocks between pools, staged pages and host memory."""

from collections import deque

import torch

from kernels import block_copy
from services.worker.runners.cuda.host_pages import PIECE_BLOCKS, HostPages
from services.worker.runners.cuda.sharing.pool import MappedGpuPool
from services.worker.runners.cuda.sharing.staging import StagedPages, warm_up
from tests.kernels.cases import poison, rand
from tests.kernels.interpreted import HALF


def test_blocks_are_copied_out_and_in_unchanged() -> None:
    pools = [rand(6, 16, 2, 3, 8, dtype=HALF) for _ in range(3)]
    before = [pool.clone() for pool in pools]
    ids = torch.tensor([4, 1])
    staging = poison(2, 3, 16, 2, 3, 8, dtype=HALF)
    addresses = block_copy.pool_addresses(pools)
    block_copy.gather_blocks(addresses, pools[0], ids, staging)
    for pool in pools:
        pool[ids] = float("nan")
    block_copy.scatter_blocks(addresses, pools[0], ids, staging)
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


def test_blocks_of_another_pool_are_staged_and_written_unchanged() -> None:
    others, pools = ([rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(3)] for _ in range(2))
    theirs, ours = ([pool.clone() for pool in each] for each in (others, pools))
    warm_up(pools)
    staged = StagedPages(pools)
    staged._pages.fill_(-1)
    room = len(staged.free)
    addresses = block_copy.pool_addresses(others)
    first, second = staged.take(2), staged.take(3)
    staged.fill(first, addresses, [5, 2])
    for layers in (slice(0, 1), slice(1, None)):
        staged.fill(second, addresses, [7, 1, 8], layers)
    assert [len(page) for page in first] == [3 * 16 * 2 * 3 * 8 * 2] * 2
    assert len(staged.free) == room - 5
    for other in others:
        other.fill_(float("nan"))
    staged.write([4, 3], first)
    staged.write([8, 1, 6], second[::-1])
    for pool, was, other in zip(pools, ours, theirs, strict=True):
        assert torch.equal(pool[[4, 3, 8, 1, 6]], other[[5, 2, 8, 1, 7]])
        assert torch.equal(pool[[0, 2, 5, 7]], was[[0, 2, 5, 7]]), "other blocks are as they were"
    del first, second
    assert len(staged.free) == room


def test_only_as_many_blocks_are_staged_as_there_are_pages() -> None:
    staged = StagedPages([rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(2)])
    kept = [staged.take(100), staged.take(100, spare=128), *(staged.take(100) for _ in range(3))]
    assert [len(pages) for pages in kept] == [100, 28, 100, 28, 0]
    assert staged.take(1, spare=128) == []


def test_blocks_of_another_pool_are_copied_in_parts_to_half_of_the_pages() -> None:
    others, pools = ([rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(4)] for _ in range(2))
    staged = StagedPages(pools)
    mapped = MappedGpuPool(staged, [other.data_ptr() for other in others], 9, lambda: None)
    staged.free = deque(list(staged.free)[: staged.count // 2 + 2])
    pages = mapped.copy([5, 2, 7], (), 0, 1)
    assert len(pages) == 2
    theirs = [other.clone() for other in others]
    others[0].fill_(float("nan"))  # What is copied is not copied again.
    for begin, end in ((1, 3), (3, None)):
        assert mapped.copy([5, 2], pages, begin, end) == pages
    staged.write([4, 3], pages)
    assert all(torch.equal(pool[[4, 3]], other[[5, 2]]) for pool, other in zip(pools, theirs, strict=True))


def test_pages_are_copied_to_host_memory_and_back_unchanged() -> None:
    pools = [rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    pages = HostPages(pools, 3 * 2 * 16 * 2 * 3 * 8 * 2)
    room = len(pages.free)
    assert room == 3 + PIECE_BLOCKS
    kept = pages.keep([5, 2, 7])
    assert [len(page) for page in kept] == [2 * 16 * 2 * 3 * 8 * 2] * 3
    for pool in pools:
        pool.zero_()
    pages.restore([1, 8, 3], kept)
    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool[[1, 8, 3]], was[[5, 2, 7]])
        assert not pool[[0, 2, 4, 5, 6, 7]].any()
    more = pages.keep([1] * (room + 4))
    assert len(more) == room - 3, "the buffer has no room for more blocks"
    del kept, more
    assert sorted(pages.free) == list(range(room))
    for pool in pools:
        pool[0] = 0
    assert 0 < pages.measure() < 10
    assert sorted(pages.free) == list(range(room))
    assert not any(pool[0].any() for pool in pools)
