"""When a gateway suspects a worker and when it gives it up, on a clock that the test sets."""

from protos import mesh_pb2 as mesh
from services.gateway.links.link_health import LinkHealth, MigrationBudget


def link(**fields: float) -> LinkHealth:
    """A link that was opened at 100 s and has received a first heartbeat."""
    health = LinkHealth.begin(100.0)
    beat(health, 100.0, **fields)
    return health


def beat(health: LinkHealth, now: float, **fields: float) -> None:
    health.heard_at = now
    health.beat(mesh.WorkerHeartbeat(**{"busy": True, **fields}), now)  # type: ignore[arg-type]


def test_a_silent_worker_is_suspect_after_a_second_and_lost_after_two() -> None:
    health = link(steps=1)
    assert not health.suspect(100.9)
    assert health.suspect(101.1)
    assert not health.dead(101.9, patient=False)
    assert health.dead(102.1, patient=False)
    assert not health.dead(109.9, patient=True), "there is no other worker"
    assert health.dead(110.1, patient=True)


def test_an_announced_long_step_is_waited_for() -> None:
    health = link(steps=1, step_s=3.0)
    assert not health.dead(108.9, patient=False)
    assert health.dead(109.1, patient=False)


def test_a_hung_step_is_lost_although_heartbeats_arrive() -> None:
    health = link(steps=1)
    for tick in range(9):
        beat(health, 100.0 + 0.25 * tick, steps=1)
        assert not health.dead(100.0 + 0.25 * tick, patient=False)
    beat(health, 102.25, steps=1)
    assert health.dead(102.25, patient=False)


def test_a_step_that_uses_the_cpu_is_slow_and_not_hung() -> None:
    health = link(steps=1)
    for tick in range(40):
        beat(health, 100.0 + 0.25 * tick, steps=1, engine_cpu_s=0.001 * tick)
        assert not health.dead(100.0 + 0.25 * tick, patient=False)
    assert health.suspect(109.75), "it gets no new jobs"
    beat(health, 110.25, steps=1, engine_cpu_s=1.0)
    assert health.dead(110.25, patient=False), "not even slow steps take for ever"


def test_an_idle_worker_makes_no_steps_and_is_healthy() -> None:
    health = link(steps=1, busy=False)
    for tick in range(40):
        beat(health, 100.0 + 0.25 * tick, steps=1, busy=False)
    assert not health.suspect(109.8)


def test_a_link_without_acknowledgements_is_suspect() -> None:
    health = link(steps=1)
    health.unacknowledged_at = 100.0
    for tick in range(6):
        beat(health, 100.0 + 0.25 * tick, steps=tick)
    assert health.suspect(101.3)
    assert not health.dead(101.3, patient=False), "its tokens flow"
    assert not health.unreceived(100.0, 101.9, patient=False)
    assert health.unreceived(100.0, 102.1, patient=False), "a job that never arrived moves"


def test_acknowledgements_that_are_late_one_after_the_other_mean_a_busy_machine() -> None:
    health = link(steps=1)
    for tick in range(40):
        health.unacknowledged_at = 100.0 + 0.25 * tick - 5.0
        beat(health, 100.0 + 0.25 * tick, steps=tick, received=tick)
        assert not health.suspect(100.2 + 0.25 * tick)
        assert not health.unreceived(95.0, 100.2 + 0.25 * tick, patient=False)


def test_tokens_without_heartbeats_between_them_are_a_backlog() -> None:
    health = link(steps=1)
    for tick in range(40):
        beat(health, 100.0 + 0.25 * tick, steps=tick)  # Nothing is sent: nothing is to be acknowledged.
    health.unacknowledged_at = 110.0
    health.heard_at = 111.5
    assert not health.suspect(111.6)
    assert not health.unreceived(110.0, 113.0, patient=False)


def test_no_worker_is_blamed_for_a_pause_of_the_gateway() -> None:
    health = link(steps=1)
    health.excuse(5.0)
    assert not health.suspect(105.9)


def test_a_worker_without_heartbeats_is_left_to_the_scheduler() -> None:
    health = LinkHealth.begin(100.0)
    assert not health.suspect(200.0)
    assert not health.dead(200.0, patient=False)
    assert not health.judges


def test_most_workers_are_never_given_up_together() -> None:
    budget = MigrationBudget()
    given_up = 0
    while budget.allows(4, 100.0):
        budget.spend(100.0)
        given_up += 1
    assert given_up == 2
    assert budget.allows(4, 110.1)
    single = MigrationBudget()
    assert single.allows(1, 100.0), "one may always be given up"
