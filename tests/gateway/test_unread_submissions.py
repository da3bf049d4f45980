"""A scheduler that is behind: many submissions that it has not read for long."""

from collections import deque

import pytest

from services.gateway.links.unread_submissions import BEHIND_S, BURST_S, FEW, FEW_OF_A_BURST, UnreadSubmissions


def busy() -> UnreadSubmissions:
    """No burst: one submission is unread, and was sent one second before the time 0."""
    unread = UnreadSubmissions()
    unread.sent(-BURST_S)
    return unread


def sent(count: int, at: float = 0.0) -> UnreadSubmissions:
    """As many submissions, all but the first sent at once."""
    unread = busy()
    for _ in range(count - 1):
        unread.sent(at)
    return unread


def test_nothing_is_refused_before_the_scheduler_counts() -> None:
    assert sent(1000).refusal(9.0) is None


def test_clients_that_start_together_are_no_overload_for_a_second() -> None:
    unread = UnreadSubmissions()
    for _ in range(FEW_OF_A_BURST - 1):
        unread.sent(0.0)
    unread.counted(0, 0.8)
    assert not unread.limited(0.8)
    unread.sent(0.8)
    unread.counted(0, 0.9)
    assert unread.refusal(0.9) is not None
    unread.counted(1, 0.95)
    assert unread.refusal(0.95) is None


@pytest.mark.parametrize(("now", "behind"), [(BURST_S - 0.01, False), (BURST_S, True)])
def test_a_burst_that_is_unread_after_a_second_is_overload(now: float, behind: bool) -> None:
    unread = UnreadSubmissions()
    for _ in range(FEW + 1):
        unread.sent(0.0)
    unread.counted(1, now)
    assert unread.limited(now) == behind


def test_many_unread_submissions_are_refused_once_they_are_old() -> None:
    unread = sent(FEW + 1)
    unread.counted(1, BEHIND_S)
    assert unread.refusal(BEHIND_S) is None
    assert not unread.limited(BEHIND_S)
    now = BEHIND_S + 0.01
    unread.counted(1, now)
    error = unread.refusal(now)
    assert error is not None
    assert (error.reason, error.retry_after_s) == ("SCHEDULER_OVERLOADED", 1.0)
    unread.counted(2, now)
    assert unread.refusal(now) is None, "a slow network delays a few, too"
    assert unread.limited(now)


def test_the_age_is_that_of_the_oldest_unread_one() -> None:
    unread = sent(FEW)
    for _ in range(FEW):
        unread.sent(1.0)
    unread.counted(FEW, 1.1)
    assert not unread.limited(1.1)
    unread.counted(FEW, 1.3)
    assert unread.limited(1.3)
    assert unread.refusal(1.3) is not None
    unread.counted(2 * FEW, 9.0)
    assert unread.refusal(9.0) is None


def test_a_scheduler_that_stood_still_is_not_behind() -> None:
    """What it did not read meanwhile is no overload, unless it is still unread some time after."""
    unread = UnreadSubmissions()
    unread.counted(0, 0.0)
    for place in range(2 * FEW):
        unread.sent(0.05 * place)
    unread.counted(1, 4.0)
    assert not unread.limited(4.0)
    unread.counted(1, 4.2)
    assert not unread.limited(4.2)
    unread.counted(1, 4.3)
    assert unread.limited(4.3)


def test_what_was_unread_is_forgotten() -> None:
    unread = sent(10 * FEW)
    unread.counted(1, 1.0)
    assert unread.refusal(1.0) is not None
    unread.counted(10 * FEW, 1.1)
    for _ in range(10 * FEW):
        unread.sent(20.0)
    assert unread.refusal(20.0) is None


@pytest.mark.parametrize(("calm_s", "taken"), [(0.9, FEW), (1.1, 10 * FEW)])
def test_a_burst_is_submitted_once_nothing_was_unread_for_a_second(calm_s: float, taken: int) -> None:
    unread = sent(2 * FEW)
    unread.counted(1, 1.0)
    assert unread.limited(1.0)
    unread.counted(2 * FEW, 1.1)
    now, submitted = 1.1 + calm_s, 0
    for _ in range(10 * FEW):
        if unread.refusal(now) is None:
            unread.sent(now)
            submitted += 1
    assert submitted == pytest.approx(taken, abs=32 * calm_s + 1)


def test_a_count_beyond_what_was_sent_is_harmless() -> None:
    unread = sent(2)
    unread.counted(5, 1.0)
    for _ in range(FEW + 3):
        unread.sent(2.0)
    for now in (8.5, 9.0):
        unread.counted(5, now)
    assert unread.refusal(9.0) is not None


@pytest.mark.parametrize("rate", [150.0, 400.0, 2500.0])
def test_a_gateway_submits_evenly_what_the_scheduler_reads(rate: float) -> None:
    """Four times as many requests arrive: no wait becomes long, the scheduler always has some to read, and the others
    are refused at any time instead of all of them now and then."""
    unread, unseen, waits = UnreadSubmissions(), deque[float](), list[float]()
    counts: deque[tuple[float, int]] = deque()
    submitted, read, budget, idle = [0] * 200, 0, 0.0, 0
    step_s = 0.001
    for step in range(20_000):
        now = step * step_s
        for _ in range(round((step + 1) * 4 * rate * step_s) - round(step * 4 * rate * step_s)):
            if unread.refusal(now) is None:
                unread.sent(now)
                unseen.append(now)
                submitted[step // 100] += 1
        budget = min(budget + rate * step_s, 1.0 + rate * step_s)
        while budget >= 1 and unseen:
            waits.append(now - unseen.popleft())
            read, budget = read + 1, budget - 1
        idle += not unseen
        counts.append((now + 0.005, read))  # The count arrives later.
        while counts and counts[0][0] <= now:
            unread.counted(counts.popleft()[1], now)
    settled = submitted[50:]
    assert max(waits) <= 6 * BEHIND_S
    assert max(waits[len(waits) // 4 :]) <= 2 * BEHIND_S
    assert idle <= 0.01 * 20_000
    assert min(settled) >= 0.5 * rate / 10
    assert max(settled) <= 1.5 * rate / 10
