"""Jobs that a worker has ahead: where answers are short, its places are filled before the scheduler knows that they are
free."""

from typing import Any

import pytest

from services.scheduler.core.messages import Role
from tests.scheduler.stage import Stage, keys

CREDITS = 8


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.gateway()
    return stage


def learn(stage: Stage, tokens: int, decode_s: float = 0.002, workers: tuple[str, ...] = ("w1",)) -> None:
    """Each worker ends one answer of this length, in the time that its rates forecast."""
    for worker in workers:
        stage.submit(f"first at {worker}", max_tokens=tokens)
        stage.now += tokens * decode_s
        for _ in range(2):
            stage.report(worker, *stage.core.state.workers[worker].jobs, tokens=tokens, decode_s=decode_s, running=0)


def fill(stage: Stage, count: int, **fields: Any) -> int:
    """Submits jobs; how many of them are placed at once."""
    before = len(stage.placed())
    for number in range(count):
        stage.submit(f"job {len(stage.placed())} {number}", **fields)
    return len(stage.placed()) - before


def test_short_answers_have_others_ahead(stage: Stage) -> None:
    stage.worker("w1", credits=CREDITS)
    learn(stage, tokens=16)
    assert fill(stage, 2 * CREDITS) == CREDITS + CREDITS // 2, "at most half of the credits"


def test_as_many_as_end_before_another_job_arrives(stage: Stage) -> None:
    stage.worker("w1", credits=CREDITS)
    learn(stage, tokens=40)
    assert fill(stage, 2 * CREDITS, max_tokens=40) == CREDITS + 2


@pytest.mark.parametrize("tokens", [0, 500])
def test_nothing_is_ahead_while_no_answer_has_ended_or_answers_are_long(stage: Stage, tokens: int) -> None:
    stage.worker("w1", credits=CREDITS)
    if tokens:
        learn(stage, tokens)
    assert fill(stage, 2 * CREDITS, max_tokens=500) == CREDITS


def test_a_free_credit_comes_first(stage: Stage) -> None:
    """Also if another worker has the prompt."""
    stage.worker("w1", credits=CREDITS)
    stage.worker("w2", credits=CREDITS, stored=keys(*range(8)))
    learn(stage, tokens=16, workers=("w1", "w2"))
    prompt: dict[str, Any] = {"prompt_tokens": 128, "block_keys": keys(*range(8))}
    assert fill(stage, 2 * CREDITS, **prompt) == 2 * CREDITS
    assert {len(worker.jobs) for worker in stage.core.state.workers.values()} == {CREDITS}
    assert fill(stage, 2 * CREDITS, **prompt) == CREDITS


def test_workers_with_roles_have_none_ahead(stage: Stage) -> None:
    stage.worker("w1", credits=CREDITS, role=Role.DECODE)
    learn(stage, tokens=16)
    assert fill(stage, 2 * CREDITS) == CREDITS


def test_the_wait_at_the_worker_is_forecast(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    learn(stage, tokens=100, decode_s=0.0001)
    assert fill(stage, 1, max_tokens=100) == 1
    stage.now += 0.004
    assert fill(stage, 3, max_tokens=100) == 2
    free_s = stage.core.state.workers["w1"].credit_free_s(0, 0.01, 0.0001, stage.now)
    assert free_s == pytest.approx(0.01), "the place of the first one to end is for the job ahead"


def test_the_wait_at_the_worker_is_no_sign_of_a_slow_one(stage: Stage) -> None:
    stage.worker("w1", credits=2)
    learn(stage, tokens=16)
    assert fill(stage, 3) == 3
    worker = stage.core.state.workers["w1"]
    for _ in range(40):
        stage.now += 0.032
        stage.report("w1", *list(worker.jobs)[:2], decode_s=0.002)
        fill(stage, 2)
    assert len(worker.jobs) == 3
    assert stage.core.state.models["story"].pace.factor == pytest.approx(1.0, abs=0.05)
