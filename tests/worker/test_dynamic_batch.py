"""The policy of dynamic batching: when a batch is computed, and which texts are in it."""

import math

from services.worker.planner.dynamic_batch import DynamicBatch, WaitingText

WAIT_S = 0.01


def text(key: int, tokens: int, now: float, place: int = 0) -> WaitingText:
    return WaitingText(key, place, tokens, now)


def filled(*sizes: int, now: float = 0.0, most_texts: int = 8) -> DynamicBatch:
    batch = DynamicBatch(100, most_texts, WAIT_S)
    for key, tokens in enumerate(sizes):
        batch.add(key, [text(key, tokens, now)], now)
    return batch


def test_a_first_text_is_computed_at_once() -> None:
    assert filled(10).wait_s(0.0) == 0.0  # Nothing says that another one will come.
    assert filled().wait_s(0.0) == math.inf


def test_a_full_batch_does_not_wait() -> None:
    assert filled(60, 50).wait_s(0.0) == 0.0
    assert filled(1, 1, 1, most_texts=3).wait_s(0.0) == 0.0


def test_texts_that_come_one_after_another_are_waited_for_but_not_beyond_the_longest_wait() -> None:
    batch, now = filled(*[1] * 6, most_texts=100), 0.0
    for key in range(6, 40):
        now += 0.001
        assert 0 < batch.wait_s(now) <= 0.01 or now > 0.008
        batch.add(key, [text(key, 1, now)], now)
    assert batch.wait_s(WAIT_S) == 0.0  # The oldest has waited for so long, and texts still come.


def test_a_batch_is_flushed_early_when_nothing_more_comes() -> None:
    batch, now = filled(*[1] * 6, most_texts=100), 0.0
    for key in range(6, 40):
        now += 0.0001
        batch.add(key, [text(key, 1, now)], now)
    overdue = batch.wait_s(now)
    assert 0 < overdue < WAIT_S / 5
    assert batch.wait_s(now + overdue) == 0.0


def test_a_lone_caller_waits_for_nobody_however_fast_its_texts_come() -> None:
    batch, now = DynamicBatch(100, 8, WAIT_S), 0.0
    for key in range(50):
        now += WAIT_S / 5
        batch.add(key, [text(key, 1, now, place) for place in range(3)], now)
        assert batch.wait_s(now) == 0.0
        assert len(batch.take()) == 3


def test_as_many_callers_as_had_texts_in_the_last_batch_are_waited_for() -> None:
    batch, now = filled(*[1] * 6), 0.0
    for turn in range(1, 20):
        assert len(batch.take()) == 6
        for place in range(6):
            assert place == 0 or 0 < batch.wait_s(now) <= WAIT_S
            now += WAIT_S / 100
            batch.add(10 * turn + place, [text(10 * turn + place, 1, now)], now)
        assert batch.wait_s(now) == 0.0


def test_a_batch_is_filled_with_texts_that_fit_and_the_first_is_never_passed_over() -> None:
    batch = filled(70, 40, 20, 50, 5)
    assert [each.key for each in batch.take()] == [0, 2, 4]
    assert [each.key for each in batch.take()] == [1, 3]
    assert (batch.take(), len(batch), batch.tokens) == ([], 0, 0)


def test_priority_goes_first_and_a_job_that_ends_leaves() -> None:
    batch = filled(10, 10)
    batch.add(9, [text(9, 10, 0.0, place) for place in range(2)], 0.0, priority=1)
    batch.drop(0)
    assert [(each.key, each.place) for each in batch.take()] == [(9, 0), (9, 1), (1, 0)]


def test_no_more_texts_are_passed_over_than_a_batch_may_have() -> None:
    batch = filled(60, *[50] * 8, 10)
    assert [each.key for each in batch.take()] == [0]  # The last one would have fit, behind eight that do not.
    assert [each.key for each in batch.take()] == [1, 2]
    assert len(batch) == 7


def test_a_job_may_leave_while_some_of_its_texts_wait() -> None:
    batch = DynamicBatch(100, 8, WAIT_S)
    batch.add(1, [text(1, 60, 0.0, place) for place in range(3)], 0.0)
    batch.add(2, [text(2, 30, 0.0)], 0.0)
    assert [(each.key, each.place) for each in batch.take()] == [(1, 0), (2, 0)]
    batch.drop(1)
    batch.drop(2)  # None of its texts is left.
    assert (len(batch), batch.tokens, batch.wait_s(0.0)) == (0, 0, math.inf)
    batch.add(1, [text(1, 20, 1.0)], 1.0)
    assert [each.tokens for each in batch.take()] == [20]
