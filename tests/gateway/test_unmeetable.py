"""Deadlines that cannot be met: about which requests the refusal of another one decides, and which are submitted."""

from typing import Any

import grpc
import pytest

from protos import inference_pb2 as api
from services.errors import WeftError, unavailable
from services.gateway.links import unmeetable
from services.gateway.links.unmeetable import Place, UnmeetableDeadlines
from tests.gateway.fakes import FakeMesh, ask, generate, rejected
from tests.gateway.test_refusals import reason_of

ERROR = WeftError(
    grpc.StatusCode.DEADLINE_EXCEEDED, unmeetable.REASON, "the answer is not expected to end in time", retry_after_s=0.5
)
LEFT_S = 3.0


PLACE = ("tenant", "model")


def decided(
    refused: api.GenerateRequest,
    new: api.GenerateRequest,
    *,
    left_s: float = LEFT_S,
    after_s: float = 0.01,
    place: Place = PLACE,
) -> bool:
    """Whether the refusal of one request with LEFT_S decides about another, `after_s` later."""
    deadlines = UnmeetableDeadlines()
    deadlines.note(PLACE, refused, LEFT_S, ERROR, 100.0)
    error = deadlines.refusal(place, new, left_s, 100.0 + after_s)
    assert error is None or error.failure() == ERROR.failure()
    return error is not None


def test_a_refusal_decides_about_requests_that_ask_for_no_less_in_no_more_time() -> None:
    assert decided(ask(), ask())
    assert decided(ask(), ask(), left_s=0.5 * LEFT_S)
    assert decided(ask(), ask("a much longer " * 100))
    assert decided(ask(max_tokens=10), ask(max_tokens=20))
    assert decided(ask(priority=1), ask(priority=1))
    assert decided(ask(priority=1), ask())
    assert decided(ask(), ask(n=1))
    assert decided(ask(), ask(n=2))
    assert decided(ask(n=2), ask(n=2))


@pytest.mark.parametrize(
    ("new", "more"),
    [
        (ask(), {"left_s": 1.2 * LEFT_S}),
        (ask(), {"left_s": float("inf")}),
        (ask(), {"after_s": 0.11}),
        (ask(max_tokens=10), {}),
        (ask(priority=1), {}),
        (ask(), {"place": ("another tenant", "model")}),
        (ask(), {"place": ("tenant", "another model")}),
    ],
)
def test_requests_that_may_have_a_chance_are_submitted(new: api.GenerateRequest, more: dict[str, Any]) -> None:
    assert not decided(ask(), new, **more)


def test_a_short_prompt_is_submitted_after_a_long_one_was_refused() -> None:
    assert not decided(ask("a much longer " * 100), ask())


def test_one_answer_is_submitted_after_several_were_refused() -> None:
    assert not decided(ask(n=16), ask())
    assert not decided(ask(n=16), ask(n=15))


def test_prompts_of_different_forms_are_not_compared() -> None:
    text = ask("a much longer " * 100)
    ids = ask(prompt=api.Prompt(token_ids=api.TokenIds(ids=[100_000] * 500)))
    assert not decided(text, ids)
    assert not decided(ids, text)
    assert decided(ids, ids)


def test_refusals_that_stand_for_no_other_request_are_dropped() -> None:
    deadlines = UnmeetableDeadlines()
    for number in range(1000):
        deadlines.note((f"tenant {number}", "model"), ask(), LEFT_S, ERROR, 0.01 * number)
        deadlines.note(PLACE, ask(), LEFT_S, ERROR, 0.01 * number)
    assert len(deadlines._refused) < 30
    assert deadlines.refusal(PLACE, ask(), LEFT_S, 10.0) is not None


def test_an_answer_without_a_bound_says_nothing_about_one_with_a_bound() -> None:
    unbounded = ask()
    unbounded.sampling.ClearField("max_tokens")
    assert not decided(unbounded, ask())
    assert not decided(ask(), unbounded)
    assert decided(unbounded, unbounded)


async def test_requests_like_a_refused_one_do_not_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmeetable, "_MOST_HOLD_S", 1e9)  # Time passes at any speed here.
    monkeypatch.setattr(unmeetable, "_HOLD", 1e9)
    async with FakeMesh() as mesh:
        mesh.scheduler.decide = lambda submit: rejected(submit, ERROR) if submit.deadline_s > 0 else None
        for _ in range(5):
            answer = await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS), timeout=30)
            assert answer.error is not None
            assert (answer.error.code(), reason_of(answer.error)) == (ERROR.code, unmeetable.REASON)
            assert answer.trailing_receipt.timings.wall_s > 0
        assert len(mesh.scheduler.submits) == 1
        patient = await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS))  # It has no deadline.
        assert patient.error is None
        assert len(mesh.scheduler.submits) == 2
        monkeypatch.setattr(unmeetable, "_MOST_HOLD_S", -1.0)
        await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS), timeout=30)
        assert len(mesh.scheduler.submits) == 3


async def test_the_refusal_of_a_retry_decides_about_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmeetable, "_MOST_HOLD_S", 1e9)
    monkeypatch.setattr(unmeetable, "_HOLD", 1e9)
    async with FakeMesh() as mesh:
        mesh.workers[0].fail_at = 0, unavailable("STEP_FAILED", "a step failed")
        mesh.scheduler.decide = lambda submit: rejected(submit, ERROR) if submit.attempt > 1 else None
        retried = await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS), timeout=30)
        assert retried.error is not None
        assert reason_of(retried.error) == unmeetable.REASON
        assert [submit.attempt for submit in mesh.scheduler.submits] == [1, 2]
        mesh.workers[0].fail_at = None
        new = await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS), timeout=30)
        assert new.error is None
