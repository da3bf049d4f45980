"""Identical requests on the real core: one leads, the others follow."""

from dataclasses import replace

from services.scheduler.core.messages import Assigned, Code, Joined, Rejected, WorkerLost
from tests.scheduler.stage import Stage


def test_an_identical_job_joins_the_running_one_without_a_credit(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("a", identity=b"same")
    answer = stage.submit("b", gateway="g2", identity=b"same")
    assert answer == Joined("b", 1, "w1", "w1:1", "a")


def test_a_follower_waits_with_its_leader(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", identity=b"same")
    assert stage.submit("b", identity=b"same") is None
    stage.report("w1", "busy")
    assert stage.placed()[-1] == ("a", "w1")
    assert stage.joined() == [("b", "a")]


def test_a_follower_takes_the_place_of_a_withdrawn_leader(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", identity=b"same")
    stage.submit("next")
    stage.submit("b", identity=b"same")
    stage.submit("c", identity=b"same")
    stage.withdraw("a")
    stage.report("w1", "busy")
    assert stage.placed()[-1] == ("b", "w1"), "the follower takes the leader's place, before `next`"
    assert stage.joined() == [("c", "b")]


def test_followers_survive_the_leaders_gateway(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("busy", gateway="g2")
    stage.submit("a", identity=b"same")
    stage.submit("b", gateway="g2", identity=b"same")
    stage.gateway_leaves("g1")
    stage.report("w1", "busy")
    assert stage.placed("g2")[-1] == ("b", "w1")


def test_a_follower_with_higher_priority_raises_that_of_its_leader(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("other", priority=1)
    stage.submit("a", identity=b"same")
    stage.submit("b", identity=b"same", priority=2)
    stage.report("w1", "busy")
    assert stage.placed()[-1] == ("a", "w1")


def test_a_follower_expires_alone(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", identity=b"same")
    stage.submit("b", identity=b"same", deadline_s=0.3)
    stage.pass_time(0.5, heartbeat=["w1"])
    assert stage.rejected() == {"b": "DEADLINE_EXPIRED"}
    stage.report("w1", "busy")
    assert stage.placed()[-1] == ("a", "w1")
    assert not stage.joined()


def test_an_expired_leader_leaves_its_place_to_a_follower_with_more_time(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", identity=b"same", deadline_s=0.3)
    stage.submit("b", identity=b"same")
    stage.pass_time(0.5, heartbeat=["w1"])
    stage.report("w1", "busy")
    assert stage.rejected() == {"a": "DEADLINE_EXPIRED"}
    assert stage.placed()[-1] == ("b", "w1")


def test_when_a_job_ended_the_next_identical_one_runs_anew(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a", identity=b"same")
    stage.report("w1", "a")
    assert isinstance(stage.submit("b", identity=b"same"), Assigned)


def test_a_joined_job_whose_worker_failed_runs_alone(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    stage.submit("a", identity=b"same")
    stage.submit("b", identity=b"same")
    stage.worker("w2", credits=2)
    answer = stage.submit("b", attempt=2, identity=b"same", avoid=frozenset({"w1"}))
    assert isinstance(answer, Assigned)
    assert answer.worker_id == "w2"


def test_after_a_lost_worker_one_job_runs_and_the_others_join_it(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("a", identity=b"same")
    stage.submit("b", gateway="g2", identity=b"same")
    stage.worker_leaves("w1")
    stage.worker("w2", credits=1)
    stage.pass_time(2.1, heartbeat=["w2"])
    assert WorkerLost("w1") in stage.inbox["g1"]
    assert WorkerLost("w1") in stage.inbox["g2"]
    w1 = frozenset({"w1"})
    assert isinstance(stage.submit("b", gateway="g2", attempt=2, identity=b"same", avoid=w1), Assigned)
    assert stage.submit("a", attempt=2, identity=b"same", avoid=w1) == Joined("a", 2, "w2", "w2:1", "b")


def test_a_retry_through_another_gateway_joins_its_own_job(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("a", body=b"one")
    stage.gateway_leaves("g1")
    assert stage.submit("a", gateway="g2", body=b"one") == Joined("a", 1, "w1", "w1:1", "a")


def test_a_request_id_in_use_for_another_body_is_refused(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("a", body=b"one")
    answer = stage.submit("a", gateway="g2", body=b"two")
    assert isinstance(answer, Rejected)
    assert (answer.failure.code, answer.failure.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE")


def test_a_retry_of_a_waiting_job_waits_with_it(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", body=b"one")
    assert stage.submit("a", gateway="g2", body=b"one") is None
    stage.report("w1", "busy")
    assert stage.joined("g2") == [("a", "a")]


def test_a_retry_outlives_the_gateway_of_the_waiting_job(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", body=b"one")
    stage.submit("a", gateway="g2", body=b"one")
    stage.gateway_leaves("g1")
    stage.report("w1", "busy")
    assert stage.placed("g2") == [("a", "w1")]


def test_a_gateway_that_lost_its_link_receives_its_answer_again(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    first = stage.submit("a", body=b"one")
    stage.gateway("g1")
    stage.now += 1.0
    assert isinstance(first, Assigned)
    assert stage.submit("a", body=b"one") == replace(first, placement=2)
    assert len(stage.core.state.workers["w1"].jobs) == 1
