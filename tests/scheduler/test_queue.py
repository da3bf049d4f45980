"""Jobs that no free worker may run: they cost nothing, block nobody and keep their places. One group: the old order."""

import itertools
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import pytest

from services.scheduler.core.fairness import EXPRESS_TURNS, TokenCounters, WaitingQueue
from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import Adapter, Assigned, Rejected, Role
from services.scheduler.core.records import Need
from tests.scheduler.stage import Stage, keys

POEMS = Adapter("poems", b"p" * 32)
LONG: dict[str, Any] = {"prompt_tokens": 128, "block_keys": keys(*range(8))}


# ---- the work of an event ----


def calls_of(act: Callable[[], object]) -> int:
    """How many functions are called, a count of work that no other process disturbs."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


def for_an_adapter(waiting: int) -> Stage:
    """`w1` is full and has the adapter of the waiting jobs, `free` has room and lacks it."""
    stage = crowd()
    stage.worker("w1", adapters=[POEMS])
    stage.worker("free", credits=4)
    for number in range(waiting + 1):
        stage.submit(f"j{number}", tenant=f"t{number % 4}", adapter=POEMS.fingerprint)
    return stage


def out_of_reach(waiting: int) -> Stage:
    """`w1` is full, and the gateway of the waiting jobs does not reach `free`."""
    stage = crowd()
    stage.worker("w1")
    stage.worker("free", credits=4)
    stage.unreachable("g1", "free:1")
    for number in range(waiting + 1):
        stage.submit(f"j{number}", tenant=f"t{number % 4}")
    return stage


def suspects(waiting: int) -> Stage:
    """All waiting jobs are suspects, and `free` has another one on probation."""
    stage = crowd()
    marks = [f"j{number}" for number in range(waiting + 1)]
    stage.worker("w1", credits=waiting + 1)
    for mark in marks:
        stage.submit(mark, fingerprint=mark.encode())
    stage.worker("free", credits=4)
    stage.worker_leaves("w1")
    for mark in marks:
        stage.submit(mark, attempt=2, fingerprint=mark.encode(), lost_on="w1", avoid=frozenset({"w1"}))
    return stage


def for_prompts(waiting: int) -> Stage:
    """The waiting jobs need a worker for prompts, too, and only one for answers is free."""
    stage = crowd()
    stage.worker("prompts", role=Role.PREFILL)
    stage.worker("free", credits=4, role=Role.DECODE)
    for number in range(waiting + 1):
        stage.submit(f"j{number}", **LONG)
    return stage


def crowd() -> Stage:
    stage = Stage(Limits(queue_limit=10_000), check=False)
    stage.gateway("g1")
    stage.gateway("g2")
    return stage


@pytest.mark.parametrize("made", [for_an_adapter, out_of_reach, suspects, for_prompts])
def test_an_event_costs_the_same_however_many_jobs_cannot_run(made: Callable[[int], Stage]) -> None:
    calls = []
    for waiting in (40, 400):
        stage = made(waiting)
        assert len(stage.core.state.models["story"].queue) == waiting
        stage.report("free")
        calls.append(calls_of(partial(stage.report, "free")))
        assert isinstance(stage.submit("plain", "g2"), Assigned), "others pass them"
    assert calls[1] <= 1.1 * calls[0], calls


# ---- jobs that cannot run keep their places ----


def test_jobs_for_an_adapter_keep_their_order_while_others_pass(stage: Stage) -> None:
    stage.worker("w1", adapters=[POEMS])
    stage.worker("w2")
    waiting: dict[str, dict[str, Any]] = {"late": {}, "resumed": {"attempt": 2}, "urgent": {"priority": 1}}
    for name, fields in {"running": {}, **waiting}.items():
        stage.submit(name, adapter=POEMS.fingerprint, **fields)
    for number in range(3):
        assert isinstance(stage.submit(f"plain{number}"), Assigned)
        stage.report("w2", f"plain{number}")
    for ended, attempt in (("running", 1), ("urgent", 1), ("resumed", 2)):
        stage.report("w1", ended, attempt=attempt)
    assert [job for job, worker in stage.placed() if worker == "w1"] == ["running", "urgent", "resumed", "late"]


def test_a_tenant_whose_job_cannot_run_loses_none_of_its_turn(stage: Stage) -> None:
    """A job that is looked at and put back must not lift its tenant to the others, as if that had been idle."""
    stage.worker("w1", adapters=[POEMS])
    stage.worker("w2")
    stage.submit("running", tenant="loud", adapter=POEMS.fingerprint, max_tokens=400)
    for name in ("quiet0", "loud", "quiet"):
        stage.submit(name, tenant=name[:4], adapter=POEMS.fingerprint)
    stage.withdraw("quiet0")
    stage.report("w2")
    stage.report("w1", "running", tokens=400)
    assert stage.placed()[-1] == ("quiet", "w1")


def test_what_a_gateway_reaches_may_change_while_its_jobs_wait(stage: Stage) -> None:
    stage.gateway("g2")
    stage.worker("w1")
    stage.submit("running")
    stage.submit("a")
    stage.submit("b", "g2")
    stage.submit("c")
    stage.unreachable("g1", "w2:1")
    stage.worker("w2")
    assert stage.placed("g2") == [("b", "w2")], "the job before it cannot run there"
    stage.report("w2", "b")
    stage.unreachable("g1")
    assert stage.placed()[1:] == [("a", "w2")]
    stage.report("w2", "a")
    assert stage.placed()[2:] == [("c", "w2")]


def test_a_waiting_job_may_become_a_suspect_and_be_cleared(stage: Stage) -> None:
    stage.worker("w1")
    stage.submit("full")
    stage.submit("again", fingerprint=b"a")
    stage.submit("a", "g1", attempt=2, fingerprint=b"a", lost_on="gone", avoid=frozenset({"gone"}))
    stage.worker("w2", credits=4)
    assert stage.placed()[1:] == [("a", "w2")], "each suspect needs a worker of its own"
    stage.survived("a")
    assert stage.placed()[2:] == [("again", "w2")]


def test_waiting_jobs_are_refused_when_their_request_is_blamed_though_no_worker_is_free(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    stage.submit("full")
    stage.submit("a", attempt=2, fingerprint=b"a", lost_on="gone")
    assert stage.placed() == [("full", "w1"), ("a", "w2")]
    stage.submit("again", fingerprint=b"a", identity=b"same")
    stage.submit("follows", fingerprint=b"a", identity=b"same")
    stage.submit("other", fingerprint=b"o")
    stage.worker_leaves("w2")
    stage.submit("a", attempt=3, fingerprint=b"a", lost_on="w2")
    assert stage.rejected() == dict.fromkeys(["a", "again", "follows"], "POISONED")


def test_jobs_that_need_no_worker_for_prompts_pass_those_that_do(stage: Stage) -> None:
    stage.worker("prompts", role=Role.PREFILL)
    stage.worker("answers", credits=4, role=Role.DECODE)
    for number in range(20):
        stage.submit(f"j{number}", **LONG)
    assert stage.placed() == [("j0", "prompts")]
    assert isinstance(stage.submit("short", prompt_tokens=32, block_keys=keys(90)), Assigned)
    assert isinstance(stage.submit("one token", **LONG | {"max_tokens": 1}), Assigned)
    stage.report("prompts", "j0", tokens=1, handed_off=True)
    assert stage.placed()[-1] == ("j1", "prompts"), "it kept its place"


def test_a_prompt_that_is_cached_where_answers_are_computed_passes_some(stage: Stage) -> None:
    stage.worker("prompts", role=Role.PREFILL)
    stage.worker("answers", credits=4, role=Role.DECODE)
    for number in range(8):
        stage.submit(f"j{number}", **LONG)
    stage.report("answers", stored_keys=keys(*range(50, 58)))
    answer = stage.submit("cached", prompt_tokens=128, block_keys=keys(*range(50, 58)))
    assert isinstance(answer, Assigned)
    assert answer.worker_id == "answers"


# ---- forecasts ----


def test_a_forecast_counts_only_workers_that_the_gateway_reaches(stage: Stage) -> None:
    stage.worker("near")
    stage.worker("far", credits=4)
    stage.unreachable("g1", "far:1")
    for worker in ("near", "far"):
        stage.report(worker, decode_s=0.1, prefill_rate=1000.0)
    stage.core.state.models["story"].lengths.mean = 100.0
    stage.submit("first", max_tokens=100)
    answer = stage.submit("second", max_tokens=100, deadline_s=15.0)
    assert isinstance(answer, Rejected), "it would begin after 10 s and end after 20"
    assert answer.failure.reason == "DEADLINE_UNMEETABLE"


# ---- the order, against a model of it ----


@dataclass(frozen=True)
class Item:
    """A job as the queue sees it."""

    order: int
    tenant: str
    priority: int
    resumed: bool
    express: bool
    need: Need
    prompt_tokens: int = 1


class PlainQueue:
    """The same order in the plainest way: the whole queue is looked at for each job."""

    def __init__(self, counters: TokenCounters) -> None:
        self.counters = counters
        self.items: list[Item] = []
        self.express_served: dict[int, int] = {}

    def push(self, item: Item) -> None:
        if all(other.tenant != item.tenant for other in self.items):
            self.counters.lift(item.tenant, {other.tenant for other in self.items})
        self.items.append(item)

    def pop(self, needs: Iterable[Need]) -> Item | None:
        able = [item for item in self.items if item.need in needs]
        if not able:
            return None
        priority = max(item.priority for item in able)
        item = self._first([item for item in able if item.priority == priority])
        self.counters.raise_floor(item.tenant)
        self.remove(item)
        return item

    def _first(self, able: list[Item]) -> Item:
        if resumed := [item for item in able if item.resumed]:
            return min(resumed, key=lambda item: item.order)
        lanes = {express: [item for item in able if item.express is express] for express in (True, False)}
        turns = self.express_served.get(able[0].priority, 0)
        express = bool(lanes[True]) and (turns < EXPRESS_TURNS or not lanes[False])
        self.express_served[able[0].priority] = turns + 1 if express else 0
        return min(lanes[express], key=lambda item: (self.counters.served(item.tenant), item.order))

    def remove(self, item: Item) -> None:
        self.items.remove(item)
        if all(other.priority != item.priority for other in self.items):
            self.express_served.pop(item.priority, None)


@pytest.mark.parametrize("groups", [1, 3])
def test_jobs_that_can_run_have_the_order_of_a_queue_that_looks_at_all(groups: int) -> None:
    needs = [Need("g1", bytes([number]), frozenset(), divided=False) for number in range(groups)]
    for seed in range(60):
        dice = random.Random(seed)
        queue, plain = WaitingQueue[Item](TokenCounters()), PlainQueue(TokenCounters())
        orders = itertools.count()
        for _ in range(300):
            action = dice.random()
            if action < 0.5:
                item = Item(
                    next(orders), dice.choice("abc"), dice.choice([0, 0, 1]), dice.random() < 0.1,
                    dice.random() < 0.5, dice.choice(needs),
                )  # fmt: skip
                queue.push(item)
                plain.push(item)
            elif action < 0.55 and plain.items:
                item = dice.choice(plain.items)
                queue.remove(item)
                plain.remove(item)
            else:
                asked = dice.sample(needs, dice.randint(1, groups))
                popped, expected = queue.pop(asked), plain.pop(asked)
                assert popped == expected, (seed, popped, expected)
                if popped is not None:
                    tokens = dice.randint(-20, 100)
                    queue.counters.charge(popped.tenant, tokens)
                    plain.counters.charge(popped.tenant, tokens)
            assert sorted(queue, key=lambda item: item.order) == sorted(plain.items, key=lambda item: item.order)
            assert set(queue.needs) == {item.need for item in plain.items}
