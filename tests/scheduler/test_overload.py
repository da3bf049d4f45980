"""Ten times the load that the workers can take, against the real core on a simulated clock: what is answered in time,
how soon the rest is refused, and how soon a new job is served afterwards."""

import itertools

import pytest

from services.scheduler.core.messages import Rejected
from tests.scheduler.overload import SERVICE_S, TOKENS, Change, Simulation

CREDITS = 8
PEAK = CREDITS / SERVICE_S
BURST_S = 60.0


@pytest.mark.parametrize(("deadline_s", "goodput", "late"), [(30.0, 0.95, 0.01), (3 * SERVICE_S, 0.9, 0.01)])
def test_ten_times_the_load_keeps_the_goodput_and_refuses_at_once(
    deadline_s: float, goodput: float, late: float
) -> None:
    simulation = Simulation()
    simulation.run(5, PEAK / 2, deadline_s)
    burst = simulation.run(BURST_S, 10 * PEAK, deadline_s)
    after = simulation.run(10, PEAK / 2, deadline_s)
    simulation.advance(simulation.stage.now + 40)
    assert sum(sent.good for sent in burst + after) >= goodput * PEAK * BURST_S
    refused = [sent for sent in burst if sent.refused_at is not None]
    assert sum(sent.refused_at != sent.at for sent in refused) <= late * len(refused)
    assert sum(sent.ended_at is not None and not sent.good for sent in burst) <= 0.02 * PEAK * BURST_S
    served = [sent.ended_at - sent.at for sent in after if sent.ended_at is not None]
    assert len(served) >= 0.95 * len(after), "requests after the burst are refused"
    assert max(served) <= 3.0 + SERVICE_S


def test_credits_that_long_answers_hold_are_not_counted_on() -> None:
    """Else jobs are let into the queue that are dropped at its end."""
    simulation = Simulation()
    simulation.run(5, PEAK / 2, 3 * SERVICE_S)
    simulation.run_long(2)
    burst = simulation.run(BURST_S / 2, 10 * PEAK, 3 * SERVICE_S)
    refused = [sent for sent in burst if sent.refused_at is not None]
    assert sum(sent.refused_at != sent.at for sent in refused) <= 0.002 * len(refused)
    assert sum(sent.good for sent in burst) >= 0.9 * PEAK * BURST_S / 2 * (CREDITS - 2) / CREDITS


def hiccups(first: float, count: int) -> list[Change]:
    """The worker stops for 200 ms every two seconds."""
    times = [first + 2 * number for number in range(count)]
    return [change for at in times for change in (Change(at, 0.0), Change(at + 0.2, 1.0))]


SLOWER = 1 / 1.15


@pytest.mark.parametrize(
    ("changes", "noise"),
    [
        pytest.param([], 0.2, id="reports_vary"),
        pytest.param([Change(5, SLOWER)], 0.1, id="slower"),
        pytest.param([Change(15, SLOWER)], 0.05, id="slower_in_the_middle"),
        pytest.param([Change(5 + n, SLOWER if n % 2 else 1.0) for n in range(20)], 0.05, id="by_turns"),
        pytest.param([Change(5 + n / 2, 1 / (1 + n / 120)) for n in range(40)], 0.05, id="slower_and_slower"),
        pytest.param(hiccups(7, 9), 0.05, id="stops"),
    ],
)
def test_hardly_any_job_is_dropped_after_its_wait_though_the_worker_changes_its_speed(
    changes: list[Change], noise: float
) -> None:
    """All jobs of the queue share the error of the forecast."""
    simulation = Simulation(credits=16, changes=changes, noise=noise)
    simulation.run(5, simulation.peak / 2, 3 * SERVICE_S)
    burst = simulation.run(20, 10 * simulation.peak, 3 * SERVICE_S)
    simulation.advance(simulation.stage.now + 5)
    refused = [sent for sent in burst if sent.refused_at is not None]
    assert sum(sent.refused_at != sent.at for sent in refused) <= 0.003 * len(refused)
    assert sum(sent.ended_at is not None and not sent.good for sent in burst) <= 0.01 * len(burst) / 10
    assert sum(sent.good for sent in burst) >= 0.95 * simulation.capacity(5, 25)


def test_a_request_is_served_soon_although_others_wait_for_long() -> None:
    simulation = Simulation()
    simulation.run(5, PEAK / 2, None)
    patient = simulation.run(0.5, 400, None)
    assert all(sent.refused_at is None for sent in patient)
    urgent = simulation.run(10, PEAK / 4, 10.0)
    simulation.advance(simulation.stage.now + 60)
    assert all(sent.ended_at is not None and sent.ended_at - sent.at <= 3 + SERVICE_S for sent in urgent)
    assert all(sent.ended_at is not None for sent in patient)


def test_sheddable_work_is_shed_first_and_fills_what_others_leave() -> None:
    simulation = Simulation()
    simulation.run(5, PEAK / 2, None)
    stage = simulation.stage
    refused = [stage.submit(f"batch-{number}", max_tokens=TOKENS, sheddable=True) for number in range(40)]
    reasons = [answer.failure.reason for answer in refused if isinstance(answer, Rejected)]
    assert set(reasons) == {"SHED"}
    assert all(answer.failure.retry_after_s > 0 for answer in refused if isinstance(answer, Rejected))
    assert 0 < 40 - len(reasons) < 2 * CREDITS
    assert stage.submit("default", max_tokens=TOKENS, deadline_s=10.0) is None  # It waits.


def test_a_patient_client_is_served_in_order() -> None:
    """A deadline of ten minutes leaves time to wait: but for a second or two, nobody overtakes."""
    simulation = Simulation()
    simulation.run(5, PEAK / 2, None)
    burst = simulation.run(0.5, 200, 600.0)
    simulation.advance(simulation.stage.now + 60)
    ends = [sent.ended_at or 0.0 for sent in burst]
    assert all(late >= early - 2.0 for early, late in itertools.pairwise(ends))
