"""The scheduler's core with a clock that the test sets: models, credits, queue, deadlines, placement, fairness."""

from dataclasses import replace

import pytest

from services.scheduler.core.lengths import AnswerLengths, Pace
from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import (
    Assigned,
    Code,
    Joined,
    ModelList,
    Refused,
    Rejected,
    SchedulerHello,
    WorkerHello,
)
from tests.scheduler.stage import CARD, Stage, keys

# ---- hello ----


def test_a_gateway_receives_the_epoch_and_the_models_first(stage: Stage) -> None:
    stage.worker("w1")
    stage.gateway("g2")
    hello, models = stage.inbox["g2"]
    assert hello == SchedulerHello(7)
    assert isinstance(models, ModelList)
    assert [(m.card.name, m.addresses) for m in models.models] == [("story", ("w1:1",))]


def test_gateways_receive_each_change_of_the_models_and_nothing_else(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    stage.report("w1")
    stage.worker_leaves("w2")
    received = [[s.addresses for s in m.models] for m in stage.inbox["g1"] if isinstance(m, ModelList)]
    assert received == [[], [("w1:1",)], [("w1:1", "w2:1")], [("w1:1",)]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"address": ""}, "address"),
        ({"credits": 0}, "credits"),
        ({"stored_keys": b"short"}, "stored_keys"),
        ({"card": replace(CARD, name="")}, "card.name"),
        ({"card": replace(CARD, block_size=0)}, "card.block_size"),
    ],
)
def test_a_worker_without_a_required_field_is_refused_and_the_field_named(
    stage: Stage, change: dict[str, object], field: str
) -> None:
    hello = replace(WorkerHello("w1", "w1:1", CARD, 1), **change)  # type: ignore[arg-type]
    stage.perform(stage.core.on_worker_attached(hello, stage.now))
    (refused,) = stage.worker_inbox[hello.worker_id]
    assert isinstance(refused, Refused)
    assert (refused.failure.code, refused.failure.field) == (Code.INVALID_ARGUMENT, field)
    assert not stage.core.state.workers


@pytest.mark.parametrize(
    "other",
    [
        replace(CARD, fingerprint=b"x" * 32),
        replace(CARD, block_size=32),
        replace(CARD, bundle_digest=b"x" * 32),
    ],
)
def test_a_worker_of_another_model_with_the_same_name_is_refused(stage: Stage, other: object) -> None:
    stage.worker("w1")
    stage.worker("w2", card=other)  # type: ignore[arg-type]
    (refused,) = stage.worker_inbox["w2"]
    assert isinstance(refused, Refused)
    assert (refused.failure.code, refused.failure.reason) == (Code.FAILED_PRECONDITION, "MODEL_MISMATCH")


def test_when_the_old_workers_are_gone_the_name_may_change_its_model(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker_leaves("w1")
    stage.submit("old-tokens")
    stage.worker("w2", card=replace(CARD, fingerprint=b"x" * 32))
    assert stage.rejected() == {"old-tokens": "NO_WORKER"}
    assert isinstance(stage.submit("new-tokens"), Assigned)


# ---- credits and the queue ----


def test_a_job_takes_a_credit_and_its_end_frees_it_for_the_next(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    first = stage.submit("a")
    assert first == Assigned("a", 1, "w1", "w1:1", 0.0, 0, placement=1)
    assert stage.submit("b") is None
    stage.now += 0.25
    stage.report("w1", "a")
    second = stage.answers()[-1]
    assert second == Assigned("b", 1, "w1", "w1:1", 0.25, 0, placement=2)


def test_the_end_of_an_older_attempt_frees_nothing(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a", attempt=1)
    stage.submit("a", attempt=2, avoid=frozenset({"w1"}))
    stage.submit("b")
    stage.report("w1", "a", attempt=1)
    assert stage.placed() == [("a", "w1"), ("a", "w1")]
    stage.report("w1", "a", attempt=2)
    assert stage.placed()[-1] == ("b", "w1")


def test_a_repeated_job_keeps_its_credit_when_its_first_run_ends(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    before = stage.submit("a")
    stage.now += 60
    again = stage.submit("a")  # Its client cancelled at the worker and sent the request again at once.
    assert isinstance(before, Assigned)
    assert isinstance(again, Assigned)
    stage.submit("b")
    stage.report("w1", "a", placement=before.placement, running=0)
    assert stage.placed() == [("a", "w1"), ("a", "w1")]
    stage.report("w1", "a", placement=again.placement)
    assert stage.placed()[-1] == ("b", "w1")


def test_the_queue_is_ordered_by_priority_then_arrival(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    for job, priority in [("first", 0), ("low", -1), ("x", 0), ("y", 0), ("high", 5)]:
        stage.submit(job, priority=priority)
    for job in ["first", "high", "x", "y"]:
        stage.report("w1", job)
    assert [job for job, _ in stage.placed()] == ["first", "high", "x", "y", "low"]


def test_a_full_queue_rejects_with_a_retry_delay(stage: Stage) -> None:
    stage = Stage(Limits(queue_limit=2))
    stage.gateway("g1")
    stage.worker("w1", credits=1)
    for job in "abc":
        stage.submit(job)
    answer = stage.submit("d")
    assert isinstance(answer, Rejected)
    assert (answer.failure.code, answer.failure.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert answer.failure.retry_after_s > 0
    assert stage.submit("moved", attempt=2) is None, "a job whose client has tokens is never rejected"


def test_followers_that_could_not_join_a_job_share_the_next_one() -> None:
    """The worker may have ended the leader before the scheduler receives its report."""
    stage = Stage()
    stage.gateway()
    stage.worker(credits=4)
    stage.submit("leader", identity=b"i")
    for job in ("a", "b"):
        assert isinstance(stage.submit(job, identity=b"i"), Joined)
    assert isinstance(stage.submit("a", attempt=2, identity=b"i", unjoinable="leader"), Assigned)
    answer = stage.submit("b", attempt=2, identity=b"i", unjoinable="leader")
    assert isinstance(answer, Joined)
    assert answer.leader_job_id == "a"


def test_a_tenant_that_fills_the_queue_leaves_the_others_their_share() -> None:
    stage = Stage(Limits(queue_limit=4))
    stage.gateway()
    stage.worker(credits=1)
    stage.submit("running")
    for number in range(5):
        stage.submit(f"many-{number}", tenant="many")
    for number in range(3):
        stage.submit(f"few-{number}", tenant="few")
    stage.submit("other-0", tenant="other")
    stage.submit("other-1", tenant="other")
    stage.submit("last-0", tenant="last")
    assert stage.rejected() == dict.fromkeys(["many-4", "few-2", "last-0"], "QUEUE_FULL")


def test_answers_are_marked_while_the_queue_is_nearly_full(stage: Stage) -> None:
    stage = Stage(Limits(queue_limit=16))
    stage.gateway("g1")
    stage.worker("w1", credits=1)
    for number in range(17):
        stage.submit(str(number))
    for number in range(4):
        stage.report("w1", str(number))
    waiting = {answer.job_id: answer.retry_after_s for answer in stage.answers() if isinstance(answer, Assigned)}
    assert waiting.pop("0") == 0, "nothing waited"
    assert [after > 0 for after in waiting.values()] == [True, True, False, False], "15, 14, 13 and 12 wait"


def test_followers_count_toward_the_queue_limit(stage: Stage) -> None:
    stage = Stage(Limits(queue_limit=2))
    stage.gateway("g1")
    stage.worker("w1", credits=1)
    stage.submit("running")
    stage.submit("a", identity=b"i")
    stage.submit("b", identity=b"i")
    stage.submit("c", identity=b"i")
    assert stage.rejected() == {"c": "QUEUE_FULL"}


def test_a_withdrawn_job_leaves_the_queue(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    for job in "abc":
        stage.submit(job)
    stage.withdraw("b")
    stage.report("w1", "a")
    assert [job for job, _ in stage.placed()] == ["a", "c"]


def test_a_withdrawal_that_crosses_the_assignment_gives_the_credit_back(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.submit("b")
    stage.withdraw("a")
    assert stage.placed() == [("a", "w1"), ("b", "w1")]


def test_one_gateway_cannot_withdraw_the_job_of_another(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.withdraw("a", gateway="g2")
    assert stage.core.state.workers["w1"].free_credits == 0


def test_the_waiting_jobs_of_a_gone_gateway_are_dropped_and_its_running_ones_run_on(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=1)
    for job in ("a", "b"):
        stage.submit(job)
    stage.submit("c", gateway="g2")
    stage.gateway_leaves("g1")
    assert stage.core.state.workers["w1"].free_credits == 0
    stage.report("w1", "a")
    assert stage.placed("g2") == [("c", "w1")]


def test_the_credit_of_a_job_that_a_dead_gateway_never_sent_is_freed(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1", credits=2)
    stage.submit("never-sent")
    stage.submit("real", gateway="g2")
    stage.gateway_leaves("g1")
    stage.pass_time(1.0, heartbeat=["w1"])
    assert stage.core.state.workers["w1"].free_credits == 0, "the job may still arrive"
    stage.pass_time(1.2, heartbeat=["w1"])
    assert list(stage.core.state.workers["w1"].jobs) == ["real"]


def test_the_credit_of_a_job_whose_answer_was_lost_with_the_link_is_freed_at_a_busy_worker(stage: Stage) -> None:
    """The gateway has attached again, but the client has left: the gateway neither submits nor withdraws the job."""
    stage.gateway("g2")
    stage.worker("w1", credits=3)
    stage.submit("lost")
    stage.submit("real", gateway="g2")
    stage.now += 0.1
    stage.gateway("g1")
    stage.submit("late")
    stage.pass_time(2.2, heartbeat=["w1"])
    assert list(stage.core.state.workers["w1"].jobs) == ["real", "late"], "of the present link none is missing"


def test_an_idle_worker_frees_the_credits_of_jobs_that_never_arrived(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("never-sent")
    stage.now += 2.1
    stage.report("w1", running=0)
    assert stage.core.state.workers["w1"].free_credits == 1


# ---- models ----


def test_an_unknown_model_is_not_found_and_an_alias_is(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    answer = stage.submit("a", model="poem")
    assert isinstance(answer, Rejected)
    assert (answer.failure.code, answer.failure.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert isinstance(stage.submit("b", model="tale"), Assigned)


def test_each_model_has_its_own_workers_and_queue(stage: Stage) -> None:
    poem = replace(CARD, name="poem", aliases=(), fingerprint=b"p" * 32)
    stage.worker("w1", credits=1)
    stage.worker("w2", credits=1, card=poem)
    stage.submit("a")
    stage.submit("b")
    stage.submit("c", model="poem")
    assert stage.placed() == [("a", "w1"), ("c", "w2")]


def test_jobs_wait_for_a_model_whose_worker_restarts(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker_leaves("w1")
    stage.pass_time(20.0)
    assert stage.submit("patient") is None
    stage.pass_time(1.5)
    stage.worker("w2")
    assert stage.placed() == [("patient", "w2")]


def test_without_any_healthy_worker_jobs_wait_two_seconds_at_most(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker_leaves("w1")
    stage.submit("a")
    stage.pass_time(1.9)
    assert not stage.rejected()
    stage.pass_time(0.3)
    (answer,) = stage.answers()
    assert isinstance(answer, Rejected)
    assert (answer.failure.code, answer.failure.reason) == (Code.UNAVAILABLE, "NO_WORKER")
    assert answer.failure.retry_after_s > 0


def test_after_half_a_minute_without_workers_a_model_is_forgotten(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker_leaves("w1")
    stage.pass_time(30.2)
    stage.submit("a")
    assert stage.rejected() == {"a": "MODEL_NOT_FOUND"}
    assert stage.inbox["g1"][-2] == ModelList(())


def test_a_draining_worker_gets_no_new_jobs(stage: Stage) -> None:
    stage.worker("w1", credits=4)
    stage.report("w1", draining=True, running=0)
    assert stage.submit("a") is None
    stage.worker("w2")
    assert stage.placed() == [("a", "w2")]


# ---- deadlines ----


def test_a_deadline_that_expires_in_the_queue_costs_no_token(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.submit("b", deadline_s=0.5)
    stage.pass_time(0.6, heartbeat=["w1"])
    (answer,) = (m for m in stage.answers() if isinstance(m, Rejected))
    assert (answer.job_id, answer.failure.code) == ("b", Code.DEADLINE_EXCEEDED)
    stage.report("w1", "a")
    assert stage.placed() == [("a", "w1")]


def test_an_expired_job_is_not_assigned_even_between_ticks(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.submit("b", deadline_s=0.5)
    stage.now += 0.51
    stage.report("w1", "a")
    assert stage.rejected() == {"b": "DEADLINE_EXPIRED"}


def test_a_deadline_that_cannot_be_met_is_refused_at_once(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.report("w1", prefill_rate=1000.0, decode_s=0.01, running=0)
    assert stage.submit("long", prompt_tokens=5000, deadline_s=2.0) is not None
    assert stage.rejected() == {"long": "DEADLINE_UNMEETABLE"}
    assert isinstance(stage.submit("short", prompt_tokens=1000, deadline_s=2.0), Assigned)


def test_a_cached_prompt_can_meet_a_deadline_that_a_new_one_cannot(stage: Stage) -> None:
    stage.worker("w1", credits=1, stored=keys(1, 2, 3))
    stage.report("w1", prefill_rate=16.0, running=0)
    answer = stage.submit("a", prompt_tokens=64, block_keys=keys(1, 2, 3, 4), deadline_s=2.0)
    assert isinstance(answer, Assigned)
    assert answer.matched_blocks == 3


def test_the_wait_in_the_queue_counts_against_the_deadline(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.report("w1", "a", tokens=100, prefill_rate=1e6, decode_s=0.005)
    for job in range(5):
        stage.submit(f"b{job}")
    stage.submit("late", deadline_s=1.9)
    stage.submit("early", deadline_s=4.0)  # In the express lane, which is full now.
    stage.submit("later", deadline_s=4.6)
    stage.submit("fine", deadline_s=20.0)
    assert stage.rejected() == {"late": "DEADLINE_UNMEETABLE", "later": "DEADLINE_UNMEETABLE"}


def test_a_job_that_others_would_overtake_beyond_its_patience_takes_the_express_lane(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a")
    stage.report("w1", "a", tokens=100, prefill_rate=1e6, decode_s=0.005)
    for job in range(5):
        stage.submit(f"b{job}")
    assert stage.submit("soon", deadline_s=28.0) is None  # 2.5 s of jobs precede it, and 2.8 s would be soon enough.
    for ended in ("b0", "b1", "b2", "soon"):
        stage.report("w1", ended, tokens=100, prefill_rate=1e6, decode_s=0.005)
    assert [name for name, _ in stage.placed()] == ["a", "b0", "b1", "b2", "soon", "b3"]


def test_the_whole_answer_must_end_before_the_deadline(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a", max_tokens=100)
    stage.report("w1", "a", tokens=100, prefill_rate=1e6, decode_s=0.01, running=0)
    stage.submit("long", max_tokens=100, deadline_s=0.9)
    assert stage.rejected() == {"long": "DEADLINE_UNMEETABLE"}
    assert isinstance(stage.submit("bounded", max_tokens=80, deadline_s=0.9), Assigned)


def test_a_worker_that_stalls_for_a_moment_has_no_long_answers(stage: Stage) -> None:
    """All its answers have had the time for their last token, so its credits are free soon."""
    stage.worker("w1", credits=64)
    stage.submit("before")
    stage.report("w1", "before", prefill_rate=1e6, decode_s=0.01, running=0)
    for job in range(300):
        stage.submit(f"j{job}", deadline_s=30.0)
    stage.now += 0.5
    stage.report("w1", "j0", "j1", prefill_rate=1e6, decode_s=0.01, running=62)
    assert stage.submit("late", deadline_s=10.0) is None  # It waits.


def test_answers_that_take_longer_than_forecast_make_later_forecasts_longer() -> None:
    pace = Pace()
    for _ in range(100):
        pace.add(1.0, 2.0)
    assert pace.factor == pytest.approx(2.0, abs=0.01)
    for _ in range(100):
        pace.add(1.0, 0.1)
    assert pace.factor == pytest.approx(1.0, abs=0.01)


def test_lengths_are_learned_by_tenant() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("a", 100) == 0
    lengths.add("a", 400)
    lengths.add("b", 20)
    assert lengths.expected("a", 1000) == 400
    assert lengths.expected("a", 100) == 100
    assert lengths.expected("b", 100) == 20
    assert lengths.expected("new", 1000) == lengths.mean == 362


def test_while_rates_are_unknown_every_job_is_admitted(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    assert isinstance(stage.submit("a", prompt_tokens=10**6, deadline_s=0.001), Assigned)


# ---- placement ----


def test_a_job_is_placed_where_its_prefix_is_cached(stage: Stage) -> None:
    stage.worker("w1", credits=4)
    stage.worker("w2", credits=4, stored=keys(1, 2))
    answer = stage.submit("a", prompt_tokens=48, block_keys=keys(1, 2, 3))
    assert isinstance(answer, Assigned)
    assert (answer.worker_id, answer.matched_blocks) == ("w2", 2)


def test_evicted_blocks_no_longer_match(stage: Stage) -> None:
    stage.worker("w2", credits=4, stored=keys(1, 2))
    stage.worker("w1", credits=4)
    stage.report("w2", evicted_keys=keys(1), running=0)
    answer = stage.submit("a", prompt_tokens=48, block_keys=keys(1, 2, 3))
    assert isinstance(answer, Assigned)
    assert (answer.worker_id, answer.matched_blocks) == ("w1", 0)


def test_a_burst_spreads_before_any_report_includes_it(stage: Stage) -> None:
    for worker in ("w1", "w2", "w3"):
        stage.worker(worker, credits=8)
    for job in range(6):
        stage.submit(f"j{job}", prompt_tokens=160)
    assert sorted(worker for _, worker in stage.placed()) == ["w1", "w1", "w2", "w2", "w3", "w3"]


def test_a_shared_prefix_does_not_place_all_jobs_on_one_worker(stage: Stage) -> None:
    stage.worker("w1", credits=64, stored=keys(1))
    stage.worker("w2", credits=64)
    for job in range(40):
        stage.submit(f"j{job}", prompt_tokens=160, block_keys=keys(1, 100 + job))
    placed = [worker for _, worker in stage.placed()]
    assert 15 <= placed.count("w2") <= 20


# ---- fairness ----


def test_the_least_served_tenant_is_next(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    for job in range(4):
        stage.submit(f"big{job}", tenant="big")
    stage.submit("small0", tenant="small")
    stage.submit("small1", tenant="small")
    for ended in ["big0", "big1", "small0", "big2", "small1"]:
        stage.report("w1", ended)
    assert [job for job, _ in stage.placed()] == ["big0", "big1", "small0", "big2", "small1", "big3"]


def test_answers_count_by_their_actual_length(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    for job in range(3):
        stage.submit(f"brief{job}", tenant="brief", prompt_tokens=10, max_tokens=1000)
        stage.submit(f"long{job}", tenant="long", prompt_tokens=10, max_tokens=100)
    stage.report("w1", "brief0", tokens=10)
    stage.report("w1", "long0", tokens=100)
    stage.report("w1", "brief1", tokens=10)
    stage.report("w1", "brief2", tokens=10)
    assert [job for job, _ in stage.placed()] == ["brief0", "long0", "brief1", "brief2", "long1"]


def test_idle_time_earns_no_credit(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    for job in range(8):
        stage.submit(f"old{job}", tenant="old")
    for job in range(4):
        stage.report("w1", f"old{job}")
    for job in range(3):
        stage.submit(f"new{job}", tenant="new")
    for ended in ["old4", "old5", "new0", "old6", "new1", "old7"]:
        stage.report("w1", ended)
    assert [job for job, _ in stage.placed()][4:] == ["old4", "old5", "new0", "old6", "new1", "old7", "new2"]


def test_a_job_that_was_lost_costs_its_tenant_nothing(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("a", tenant="t")
    counters = stage.core.state.models["story"].queue.counters
    assert counters.served("t") == 48
    stage.worker_leaves("w1")
    stage.pass_time(2.1)
    assert counters.served("t") == 0


def test_a_follower_that_submits_again_waits_once(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", identity=b"same")
    stage.submit("b", identity=b"same")
    stage.submit("b", identity=b"same", attempt=2)
    stage.report("w1", "busy")
    assert [(m.job_id, m.attempt) for m in stage.answers() if isinstance(m, Joined)] == [("b", 2)]


def test_the_end_of_an_abandoned_leader_does_not_end_its_successor(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    stage.submit("a", identity=b"same")
    stage.worker("w2", credits=2)
    stage.submit("b", attempt=2, identity=b"same", avoid=frozenset({"w1"}))
    stage.report("w1", "a")
    assert stage.submit("c", identity=b"same") == Joined("c", 1, "w2", "w2:1", "b")


def test_a_follower_does_not_join_at_the_worker_that_failed_it(stage: Stage) -> None:
    for worker in ("w1", "w2"):
        stage.worker(worker, credits=1)
        stage.submit(f"busy-{worker}")
    stage.submit("a", identity=b"same")
    stage.submit("b", attempt=2, identity=b"same", avoid=frozenset({"w1"}))
    stage.report("w1", "busy-w1")
    assert stage.placed()[-1] == ("a", "w1")
    assert not stage.joined()
    stage.report("w2", "busy-w2")
    assert stage.placed()[-1] == ("b", "w2")


def test_followers_of_a_replaced_attempt_are_admitted_again(stage: Stage) -> None:
    stage.worker("w1", credits=1)
    stage.submit("busy")
    stage.submit("a", identity=b"same")
    stage.submit("b", identity=b"same")
    stage.submit("a", attempt=2)
    stage.report("w1", "busy")
    stage.report("w1", "a", attempt=2)
    assert stage.placed()[1:] == [("a", "w1"), ("b", "w1")]
