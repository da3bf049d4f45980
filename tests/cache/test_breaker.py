"""The breaker, with the time as an argument."""

from hypothesis import given
from hypothesis import strategies as st

from services.cache.breaker import Breaker


def test_it_opens_after_five_failures_in_a_row() -> None:
    breaker = Breaker()
    assert [breaker.failed(0.0) for _ in range(5)] == [False, False, False, False, True]
    assert breaker.is_open


def test_a_success_resets_the_count() -> None:
    breaker = Breaker()
    for _ in range(20):
        for _ in range(4):
            breaker.failed(0.0)
        assert breaker.succeeded(0.0) is None
    assert not breaker.is_open


def test_it_opens_when_two_failures_span_a_while() -> None:
    breaker = Breaker()
    assert not breaker.failed(10.0)
    assert breaker.failed(10.25)


def test_one_failure_alone_does_not_open_it() -> None:
    breaker = Breaker()
    breaker.failed(0.0)
    breaker.succeeded(1.0)
    assert not breaker.failed(100.0)
    assert breaker.allows(100.0)


def test_an_open_breaker_permits_one_probe_per_second() -> None:
    breaker = Breaker()
    breaker.trip(0.0)
    asked = [tick / 100 for tick in range(1000) if breaker.allows(tick / 100)]
    assert asked == [float(second) for second in range(1, 10)]


def test_a_probe_that_succeeds_closes_it_and_returns_how_long_it_was_open() -> None:
    breaker = Breaker()
    breaker.trip(5.0)
    assert breaker.allows(6.5)
    assert not breaker.failed(6.6)
    assert breaker.allows(7.5)
    assert breaker.succeeded(7.6) == 7.6 - 5.0
    assert all(breaker.allows(7.6) for _ in range(100))


events = st.lists(st.tuples(st.floats(0, 0.3), st.sampled_from(["ask", "fail", "succeed"])), max_size=200)


@given(events)
def test_while_open_probes_are_a_second_apart(events: list[tuple[float, str]]) -> None:
    breaker, now, last = Breaker(), 0.0, None
    for pause, event in events:
        now += pause
        if event == "fail":
            breaker.failed(now)
        elif event == "succeed":
            breaker.succeeded(now)
            assert not breaker.is_open
        elif breaker.is_open and breaker.allows(now):
            assert last is None or now - last >= 1.0
            last = now
        if not breaker.is_open:
            last = None
            assert breaker.allows(now)
