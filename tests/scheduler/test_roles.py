"""Workers with roles: one worker for a prompt, one for its answer, and any worker where those are missing."""

from typing import Any

import pytest

from services.scheduler.core.messages import Assigned, Handoff, Joined, Role
from tests.scheduler.stage import Stage, keys

LONG: dict[str, Any] = {"prompt_tokens": 128, "block_keys": keys(*range(8))}


@pytest.fixture
def stage() -> Stage:
    """A gateway, a worker for prompts and one for answers."""
    made = Stage()
    made.gateway()
    made.worker("prompts", credits=2, role=Role.PREFILL)
    made.worker("answers", credits=2, role=Role.DECODE)
    return made


def divided(stage: Stage, job_id: str = "a", **fields: Any) -> Assigned:
    """Submits a long job, which must be divided."""
    answer = stage.submit(job_id, **{**LONG, **fields})
    assert isinstance(answer, Assigned)
    assert answer.worker_id == "prompts"
    assert answer.handoff is not None
    return answer


def free(stage: Stage, worker_id: str) -> int:
    return stage.core.state.workers[worker_id].free_credits


def test_a_job_has_a_credit_of_both_workers_until_it_is_handed_off(stage: Stage) -> None:
    first = divided(stage)
    assert first.handoff == Handoff("answers", "answers:1", first.placement + 1)
    assert (free(stage, "prompts"), free(stage, "answers")) == (1, 1)
    stage.report("prompts", "a", tokens=1, placement=first.placement, handed_off=True)
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 1)
    stage.report("answers", "a", tokens=9, placement=first.placement + 1)
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 2)
    assert stage.core.state.counters.tokens == 10
    assert stage.core.state.counters.ended == 1


def test_the_end_of_the_answer_may_be_reported_before_the_handoff(stage: Stage) -> None:
    first = divided(stage)
    stage.report("answers", "a", tokens=9, placement=first.placement + 1)
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 2)
    stage.report("prompts", "a", tokens=1, placement=first.placement, handed_off=True)
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 2)


def test_an_answer_that_ends_with_its_first_token_frees_both_credits(stage: Stage) -> None:
    first = divided(stage)
    stage.report("prompts", "a", tokens=1, placement=first.placement)
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 2)


@pytest.mark.parametrize("handed_off", [False, True])
def test_a_withdrawn_job_frees_both_credits(stage: Stage, handed_off: bool) -> None:
    first = divided(stage)
    if handed_off:
        stage.report("prompts", "a", tokens=1, placement=first.placement, handed_off=True)
    stage.withdraw("a")
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": 32, "block_keys": keys(0, 1)},
        {"prompt_tokens": 128, "block_keys": b""},
        {**LONG, "max_tokens": 1},
    ],
    ids=["short", "not cached", "one token"],
)
def test_a_job_that_is_not_worth_dividing_runs_where_answers_do(stage: Stage, fields: dict[str, Any]) -> None:
    answer = stage.submit("a", **fields)
    assert isinstance(answer, Assigned)
    assert (answer.worker_id, answer.handoff) == ("answers", None)


def test_a_worker_that_holds_the_prompt_computes_the_rest_itself(stage: Stage) -> None:
    stage.report("answers", stored_keys=keys(*range(6)))
    answer = stage.submit("a", **LONG)
    assert isinstance(answer, Assigned)
    assert (answer.worker_id, answer.matched_blocks, answer.handoff) == ("answers", 6, None)


@pytest.mark.parametrize("missing", ["prompts", "answers"])
def test_without_a_worker_of_a_role_the_other_one_does_everything(stage: Stage, missing: str) -> None:
    stage.worker_leaves(missing)
    answer = stage.submit("a", **LONG)
    assert isinstance(answer, Assigned)
    assert answer.worker_id == ("answers" if missing == "prompts" else "prompts")
    assert answer.handoff is None


@pytest.mark.parametrize(
    ("role", "first", "second"), [(Role.PREFILL, "special", "both"), (Role.DECODE, "both", "special")]
)
def test_a_worker_without_a_role_stands_in(role: Role, first: str, second: str) -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("special", role=role)
    stage.worker("both")
    answer = stage.submit("a", **LONG)
    assert isinstance(answer, Assigned)
    assert (answer.worker_id, answer.handoff and answer.handoff.worker_id) == (first, second)


def test_a_job_waits_for_both_credits_or_runs_whole_on_a_worker_without_a_role(stage: Stage) -> None:
    ends = [divided(stage, name, block_keys=keys(*range(at, at + 8))) for at, name in ((0, "a"), (10, "b"))]
    assert stage.submit("c", **LONG) is None
    stage.worker("both", credits=1)
    assert stage.placed()[-1] == ("c", "both")
    assert stage.submit("d", **LONG) is None
    stage.report("prompts", "a", "b", tokens=1, handed_off=True)
    assert stage.placed()[-1] == ("c", "both"), "there is a worker for its prompt, but none for its answer"
    stage.report("answers", "a", tokens=5, placement=ends[0].placement + 1)
    assert stage.placed()[-1] == ("d", "prompts")


def test_a_follower_learns_where_its_leader_continues(stage: Stage) -> None:
    first = divided(stage, identity=b"same")
    joined = stage.submit("b", **LONG, identity=b"same")
    assert isinstance(joined, Joined)
    assert (joined.worker_id, joined.handoff) == ("prompts", first.handoff)
    stage.report("prompts", "a", tokens=1, placement=first.placement, handed_off=True)
    joined = stage.submit("c", **LONG, identity=b"same")
    assert isinstance(joined, Joined)
    assert (joined.worker_id, joined.handoff) == ("answers", None)


def test_a_lost_worker_for_prompts_leaves_no_credit_behind(stage: Stage) -> None:
    divided(stage)
    stage.worker_leaves("prompts")
    stage.pass_time(10.0, heartbeat=["answers"])
    assert free(stage, "answers") == 2
    answer = stage.submit("a", attempt=2, **LONG)
    assert isinstance(answer, Assigned)
    assert (answer.worker_id, answer.handoff) == ("answers", None)


def test_a_lost_worker_for_answers_ends_the_job_with_its_first_token(stage: Stage) -> None:
    first = divided(stage)
    stage.worker_leaves("answers")
    stage.pass_time(10.0, heartbeat=["prompts"])
    stage.report("prompts", "a", tokens=1, placement=first.placement, handed_off=True)
    assert free(stage, "prompts") == 2


def test_a_worker_that_registers_again_still_expects_its_jobs(stage: Stage) -> None:
    first = divided(stage)
    stage.worker("answers", credits=2, role=Role.DECODE, running=["a"])
    assert free(stage, "answers") == 1
    stage.worker("prompts", credits=2, role=Role.PREFILL)
    assert (free(stage, "prompts"), free(stage, "answers")) == (2, 1), "it has handed the job off meanwhile"
    stage.report("answers", "a", tokens=9, placement=first.placement + 1)
    assert free(stage, "answers") == 2


def test_a_job_is_named_the_worker_that_holds_most_of_its_prompt() -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("one", credits=1)
    stage.worker("two", credits=1)
    stage.report("one", stored_keys=keys(*range(8)))
    first, second = stage.submit("a", **LONG), stage.submit("b", **LONG)
    assert isinstance(first, Assigned)
    assert isinstance(second, Assigned)
    assert (first.worker_id, first.source) == ("one", "")
    assert (second.worker_id, second.source) == ("two", "one:1")
