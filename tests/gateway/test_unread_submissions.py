"""A scheduler that is behind: many submissions that it has not read for long."""

from services.gateway.links.unread_submissions import BEHIND_S, FEW, UnreadSubmissions


def sent(count: int, at: float = 0.0) -> UnreadSubmissions:
    """As many submissions, all sent at once."""
    unread = UnreadSubmissions()
    for _ in range(count):
        unread.sent(at)
    return unread


def test_nothing_is_refused_before_the_scheduler_counts() -> None:
    assert sent(1000).refusal() is None


def test_many_unread_submissions_are_refused_once_they_are_old() -> None:
    unread = sent(FEW + 1)
    unread.counted(1, BEHIND_S)
    assert unread.refusal() is None
    unread.counted(1, BEHIND_S + 0.01)
    error = unread.refusal()
    assert error is not None
    assert (error.reason, error.retry_after_s) == ("SCHEDULER_OVERLOADED", 1.0)
    unread.counted(2, BEHIND_S + 0.02)
    assert unread.refusal() is None, "a slow network delays a few, too"


def test_the_age_is_that_of_the_oldest_unread_one() -> None:
    unread = sent(FEW)
    for _ in range(FEW):
        unread.sent(1.0)
    unread.counted(FEW - 1, 1.1)
    assert unread.refusal() is not None
    unread.counted(FEW, 1.1)
    assert unread.refusal() is None
    unread.counted(2 * FEW, 9.0)
    assert unread.refusal() is None


def test_a_count_beyond_what_was_sent_is_harmless() -> None:
    unread = sent(2)
    unread.counted(5, 1.0)
    for _ in range(FEW + 3):
        unread.sent(2.0)
    unread.counted(5, 9.0)
    assert unread.refusal() is not None
