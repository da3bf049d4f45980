"""Fetch or recompute: the decision by measured transfer costs."""

import pytest

from services.worker.kvcache.transfer_cost import ADVANTAGE, TransferCost, recompute_s

MIB = 1 << 20


def link(latency_s: float, bytes_per_s: float) -> TransferCost:
    made = TransferCost()
    made.answered(latency_s)
    made.moved(MIB, latency_s + MIB / bytes_per_s)
    return made


def test_nothing_is_predicted_before_it_is_measured() -> None:
    unknown = TransferCost()
    unknown.answered(0.001)
    assert not unknown.known
    assert unknown.predict(1) is None
    assert not unknown.is_faster(1, 1e9)


def test_a_fast_link_is_faster_than_computing_and_a_slow_one_is_not() -> None:
    six_mib_s = recompute_s(1000, 4000.0)
    assert link(0.002, 100e6).is_faster(6 * MIB, six_mib_s)
    assert not link(0.002, 1e6).is_faster(6 * MIB, six_mib_s)
    assert not link(0.3, 100e6).is_faster(6 * MIB, six_mib_s), "the latency alone exceeds the time to compute"


def test_fetching_must_be_clearly_faster() -> None:
    even = link(0.0, MIB)
    assert not even.is_faster(MIB, 1.0)
    assert not even.is_faster(MIB, 0.99 / ADVANTAGE)
    assert even.is_faster(MIB, 1.01 / ADVANTAGE)


def test_nothing_is_fetched_until_the_prefill_rate_is_measured() -> None:
    assert recompute_s(1000, 0.0) == 0.0
    assert not link(0.0, 1e12).is_faster(MIB, 0.0)


def test_one_slow_transfer_outweighs_many_fast_ones() -> None:
    changed = link(0.001, 500e6)
    for _ in range(20):
        changed.moved(6 * MIB, 0.02)
    changed.moved(MIB // 4, 0.25)
    assert not changed.is_faster(6 * MIB, 0.25)
    for _ in range(8):
        changed.moved(6 * MIB, 0.02)
    assert changed.is_faster(6 * MIB, 0.25), "fast transfers restore the estimate"


def test_latency_is_not_counted_as_transfer() -> None:
    far = link(0.05, 100e6)
    far.moved(MIB, 0.05 + MIB / 100e6)
    assert far.predict(0) == pytest.approx(0.05)
    assert far.predict(100_000_000) == pytest.approx(1.05, rel=0.05)


def test_a_transfer_without_a_byte_counts_as_slow() -> None:
    dead = link(0.001, 100e6)
    dead.moved(0, 0.2)
    assert not dead.is_faster(MIB, 1.0)
