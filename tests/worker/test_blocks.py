"""The block pool: blocks are never lost or allocated twice, and the least recently used are evicted first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.planner.block_pool import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_blocks_are_allocated_and_released() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert len(set(blocks)) == 3
    assert 0 not in blocks
    assert (pool.free, pool.cached, pool.active) == (1, 0, 3)
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.active) == (4, 0, 0)


def test_published_blocks_are_found_up_to_the_end_of_the_prefix() -> None:
    pool = BlockPool(8)
    blocks = pool.take(3)
    for block, number in zip(blocks, (1, 2, 3), strict=True):
        pool.publish(block, key(number))
    pool.release(blocks)
    assert (pool.free, pool.cached) == (5, 3)
    assert pool.match([key(1), key(2), key(9), key(3)]) == blocks[:2]
    pool.share(blocks[:2])
    assert (pool.cached, pool.active) == (1, 2)


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    pool = BlockPool(4)
    for numbers in ((1, 2), (3, 4)):
        blocks = pool.take(2)
        for block, number in zip(blocks, numbers, strict=True):
            pool.publish(block, key(number))
        pool.release(blocks)
    touched = pool.match([key(1), key(2)])
    pool.share(touched)
    pool.release(touched)
    assert pool.take_changes() == ([key(1), key(2), key(3), key(4)], [])
    pool.take(1)
    assert pool.take_changes() == ([], [key(4)])
    pool.take(2)
    assert pool.take_changes() == ([], [key(3), key(2)])


def test_a_shared_block_outlives_one_of_its_owners() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, key(1))
    pool.share(pool.match([key(1)]))
    pool.release([block])
    assert (pool.active, pool.cached) == (1, 0)
    pool.release([block])
    assert (pool.active, pool.cached) == (0, 1)


def test_the_first_block_published_with_a_key_is_kept() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    assert pool.match([key(1)]) == [first]
    pool.release([first, second])
    assert (pool.free, pool.cached) == (1, 1)


def test_a_withdrawn_block_is_not_found_unless_others_share_it() -> None:
    pool = BlockPool(2)
    alone, shared = pool.take(2)
    pool.publish(alone, key(1))
    pool.publish(shared, key(2))
    pool.share([shared])
    pool.withdraw(alone)
    pool.withdraw(shared)
    assert pool.match([key(1)]) == []
    assert pool.match([key(2)]) == [shared]


def test_overdrawing_and_double_release_raise() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 available"):
        pool.take(3)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="has no owner"):
        pool.release(blocks)


class PoolHistory(RuleBasedStateMachine):
    """Any sequence of operations keeps the pool consistent with a model of owners and ages."""

    TOTAL = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.TOTAL)
        self.held: list[list[int]] = []
        self.numbers = 0
        self.seen: dict[bytes, bool] = {}

    @precondition(lambda self: self.pool.available > 0)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.available))
        taken = self.pool.take(count)
        in_use = {block for blocks in self.held for block in blocks}
        assert not in_use & set(taken), "a block in use was allocated again"
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        for block in blocks:
            self.numbers += 1
            self.pool.publish(block, key(data.draw(st.integers(0, self.numbers))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.pool.withdraw(data.draw(st.sampled_from(self.held))[0])

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        found = self.pool.match([key(data.draw(st.integers(0, self.numbers)))])
        if found:
            idle, before = self.pool.idle(found), self.pool.available
            self.pool.share(found)
            assert self.pool.available == before - idle
            self.held.append(found)

    @invariant()
    def the_pool_agrees_with_the_model(self) -> None:
        self.pool.check()
        active = {block for blocks in self.held for block in blocks}
        assert self.pool.active == len(active)

    @rule()
    def the_reported_changes_add_up(self) -> None:
        stored, evicted = self.pool.take_changes()
        self.seen.update(dict.fromkeys(evicted, False))
        self.seen.update(dict.fromkeys(stored, True))
        assert all(bool(self.pool.match([k])) == known for k, known in self.seen.items())


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
