"""Workers that stall, detach or come back, and the jobs that they had, on the real core."""

from services.scheduler.core.messages import Assigned, WorkerLost
from tests.scheduler.stage import Stage, keys

# ---- next attempts ----


def test_the_next_attempt_avoids_the_worker_that_failed(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    stage.submit("a")
    stage.worker("w2", credits=2)
    answer = stage.submit("a", attempt=2, avoid=frozenset({"w1"}))
    assert isinstance(answer, Assigned)
    assert (answer.attempt, answer.worker_id) == (2, "w2")
    assert not stage.core.state.workers["w1"].jobs


def test_an_avoided_worker_is_used_if_there_is_no_other(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    assert isinstance(stage.submit("a", attempt=2, avoid=frozenset({"w1"})), Assigned)


def test_a_job_waits_for_another_worker_rather_than_take_the_one_that_failed(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("long")
    stage.worker("w2", credits=1)
    assert stage.submit("a", attempt=2, avoid=frozenset({"w2"})) is None
    assert isinstance(stage.submit("b"), Assigned), "the free credit goes to another job"
    stage.report("w1", "long")
    assert stage.placed()[-1] == ("a", "w1")


def test_resumed_jobs_precede_their_priority_class_in_their_old_order(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    for job in ("a", "b", "waits"):
        stage.submit(job)
    stage.worker_leaves("w1")
    stage.submit("b", attempt=2, avoid=frozenset({"w1"}))
    stage.submit("a", attempt=2, avoid=frozenset({"w1"}))
    stage.submit("urgent", priority=1)
    stage.worker("w2", credits=4)
    assert [job for job, _ in stage.placed()][2:] == ["urgent", "a", "b", "waits"]


# ---- stalls, broken links and restarts ----


def test_a_short_break_of_a_link_loses_no_job(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    stage.submit("a")
    stage.submit("b")
    stage.worker_leaves("w1")
    stage.pass_time(1.5)
    stage.worker("w1", credits=2, running=["a"])
    assert not [m for m in stage.inbox["g1"] if isinstance(m, WorkerLost)]
    assert list(stage.core.state.workers["w1"].jobs) == ["a"], "b ended while the link was broken"


def test_a_worker_that_does_not_reconnect_is_lost(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.worker_leaves("w1")
    stage.pass_time(2.2)
    assert WorkerLost("w1") in stage.inbox["g1"]
    stage.worker("w2", credits=1)
    assert isinstance(stage.submit("a", attempt=2, avoid=frozenset({"w1"})), Assigned)


def test_a_worker_without_jobs_is_removed_without_a_message(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker_leaves("w1")
    stage.pass_time(3.0)
    assert WorkerLost("w1") not in stage.inbox["g1"]
    assert not stage.core.state.workers


def test_a_hung_worker_gets_no_jobs_and_gateways_receive_one_hint(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    stage.submit("a")
    stage.report("w1", steps=3)
    for _ in range(42):
        stage.pass_time(0.1)
        stage.report("w1", steps=3)
    assert stage.inbox["g1"].count(WorkerLost("w1")) == 1
    assert stage.submit("b") is None, "it is suspect"
    assert not stage.dropped, "its link works"
    stage.report("w1", steps=4)
    assert stage.placed()[-1] == ("b", "w1")


def test_a_worker_without_enough_cpu_time_gets_no_jobs_and_loses_none(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    stage.submit("a")
    stage.report("w1", steps=3)
    for tick in range(42):
        stage.pass_time(0.1)
        stage.report("w1", steps=3, engine_cpu_s=0.01 * tick)
    assert WorkerLost("w1") not in stage.inbox["g1"]
    assert stage.submit("b") is None
    assert list(stage.core.state.workers["w1"].jobs) == ["a"]


def test_a_busy_worker_whose_first_step_hangs_is_suspect(stage: Stage) -> None:
    """Its counters are those of the idle engine: no step has ended since the job arrived."""
    stage.worker("w1", credits=2)
    stage.submit("a")
    for _ in range(30):
        stage.pass_time(0.1)
        stage.report("w1", steps=3, running=0, busy=True)
    assert WorkerLost("w1") in stage.inbox["g1"]


# ---- workers out of a gateway's reach ----


def test_a_gateways_jobs_avoid_workers_that_it_cannot_reach(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=8)
    stage.worker("w2", credits=8)
    stage.unreachable("g1", "w1:1")
    for number in range(4):
        stage.submit(f"a{number}")
        stage.submit(f"b{number}", "g2")
    assert {worker for _, worker in stage.placed("g1")} == {"w2"}
    assert "w1" in {worker for _, worker in stage.placed("g2")}


def test_a_job_waits_until_its_gateway_reaches_a_worker(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    stage.unreachable("g1", "w1:1")
    assert stage.submit("a") is None
    assert stage.submit("b") is None
    stage.pass_time(1.0, heartbeat=["w1"])
    stage.unreachable("g1")
    assert stage.placed() == [("a", "w1"), ("b", "w1")]
    stage.unreachable("g1", "w1:1")
    stage.submit("c")
    stage.submit("d", attempt=2)
    stage.pass_time(2.2, heartbeat=["w1"])
    assert stage.rejected() == {"c": "NO_WORKER"}
    stage.pass_time(57.0, heartbeat=["w1"])
    assert stage.rejected() == {"c": "NO_WORKER"}, "a resumed job waits longer"
    stage.pass_time(2.0, heartbeat=["w1"])
    assert stage.rejected() == {"c": "NO_WORKER", "d": "NO_WORKER"}


def test_no_job_joins_another_at_a_worker_that_its_gateway_cannot_reach(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.unreachable("g1", "w1:1")
    stage.submit("a", "g2", identity=b"x")
    assert stage.submit("b", identity=b"x") is None
    stage.worker("w2", credits=1)
    assert stage.placed() == [("b", "w2")]


def test_a_resumed_job_waits_for_a_loading_worker(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.worker_leaves("w1")
    stage.pass_time(2.2)
    stage.loading("w2")
    stage.submit("a", attempt=2, avoid=frozenset({"w1"}))
    stage.submit("new")
    stage.pass_time(20.0)
    assert stage.rejected() == {"new": "NO_WORKER"}
    stage.worker("w2", credits=1)
    assert stage.placed()[-1] == ("a", "w2")


def test_a_resumed_job_without_a_worker_in_sight_is_rejected_sooner(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.worker_leaves("w1")
    stage.pass_time(2.2)
    stage.submit("a", attempt=2, avoid=frozenset({"w1"}))
    stage.pass_time(29.0)
    assert not stage.rejected()
    stage.pass_time(1.2)
    assert stage.rejected() == {"a": "NO_WORKER"}


def test_a_worker_may_take_three_predicted_steps_without_progress(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.report("w1", steps=3, step_s=4.0)
    stage.pass_time(11.5)
    assert not stage.dropped
    stage.pass_time(1.0)
    assert stage.dropped == ["w1"]


def test_a_short_stall_moves_no_job(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.report("w1")
    stage.pass_time(1.9)
    stage.report("w1")
    stage.pass_time(1.9)
    assert not stage.dropped


def test_a_pause_of_the_scheduler_costs_no_worker_its_registration(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.now += 5.0
    stage.core.on_pause(5.0)
    stage.perform(stage.core.on_tick(stage.now))
    assert not stage.dropped


def test_an_idle_worker_that_stops_reporting_gets_no_jobs_until_it_reports(stage: Stage) -> None:
    stage.worker("w1")
    stage.pass_time(2.5)
    assert stage.submit("a") is None
    stage.report("w1", running=0)
    assert stage.placed() == [("a", "w1")]


def test_reports_of_a_lost_worker_are_ignored_until_its_next_hello(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.pass_time(2.5)
    stage.report("w1", "a", stored_keys=keys(1))
    assert not stage.core.state.workers
    stage.worker("w1", credits=1, running=["a"])
    assert isinstance(stage.submit("a", attempt=2), Assigned), (
        "the next attempt replaces the one that the lost worker still runs"
    )


def test_after_a_restart_the_workers_report_their_running_jobs(stage: Stage) -> None:
    stage.worker("w1", credits=2, running=["a", "b"])
    assert stage.submit("c") is None
    stage.report("w1", "a")
    assert stage.placed() == [("c", "w1")]


def test_right_after_a_start_jobs_wait_for_the_first_hello_of_their_model() -> None:
    stage = Stage(started=99.9)
    stage.gateway("g1")
    assert stage.submit("a", model="tale") is None
    assert stage.submit("b", model="story") is None
    stage.submit("c", model="nonsense")
    stage.now += 0.5
    stage.worker("w1", credits=2)
    assert stage.placed() == [("a", "w1"), ("b", "w1")]
    stage.pass_time(2.0)
    assert stage.rejected() == {"c": "MODEL_NOT_FOUND"}
    assert list(stage.core.state.models) == ["story"]
