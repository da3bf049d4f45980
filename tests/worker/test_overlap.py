"""Two steps in flight: answers are those of one step at a time, and no block is free while a step may write to it."""

from typing import Any

import pytest

from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason
from services.worker.runners.base import StepResult
from services.worker.runners.cpu.runner import CpuRunner, CpuStep
from services.worker.runners.step import Words
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, job, prompt_of, run, solo


class LateRunner:
    """The CPU's runner with the timing of a device: a step's result is available after the next one was launched."""

    depth = 2

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.in_flight = self.most_in_flight = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, words: Words) -> CpuStep:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self._runner.launch(words)

    def collect(self, step: CpuStep) -> StepResult:
        self.in_flight -= 1
        return self._runner.collect(step)


@pytest.fixture
def late(engine: EngineMaker) -> EngineMaker:
    """A function like `engine` that opens engines with two steps in flight."""

    def make(shape: str = "llama", **options: object) -> GenerationEngine:
        made = engine(shape, **options)
        assert isinstance(made.runner, CpuRunner)
        made.runner = LateRunner(made.runner)
        return made

    return make


def same(answers: dict[int, Answer], expected: dict[int, Answer]) -> None:
    for key, answer in expected.items():
        assert answers[key].tokens == answer.tokens
        assert answers[key].positions == answer.positions
        assert answers[key].ended.reason is answer.ended.reason


def test_answers_are_the_same_with_two_steps_in_flight(engine: EngineMaker, late: EngineMaker) -> None:
    jobs = [job(key, prompt_of(9 + 5 * key), max_tokens=5 + 3 * key, temperature=key % 2, seed=key) for key in range(9)]
    ahead = late(step_tokens=64)
    same(run(ahead, *jobs), run(engine(), *jobs))
    assert isinstance(ahead.runner, LateRunner)
    assert (ahead.runner.most_in_flight, ahead.runner.in_flight) == (2, 0)
    assert ahead.stats().active_blocks == 0


def test_a_job_sent_during_a_launch_is_in_the_next_step(late: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = late()
    launch, coming = ahead.runner.launch, [job(2, prompt_of(30, seed=1), max_tokens=4)]

    def slow(words: Words) -> Any:
        while coming:
            ahead.submit(coming.pop())
        return launch(words)

    monkeypatch.setattr(ahead.runner, "launch", slow)
    ahead.submit(job(1, prompt_of(20), max_tokens=4))
    ahead.step()
    assert {sequence.job.key for sequence in ahead.planner.running} == {1, 2}


def test_a_row_that_is_computed_after_a_stop_is_not_reported(late: EngineMaker) -> None:
    ahead = late()
    free = solo(ahead, job(1, prompt_of(20), max_tokens=24))
    stop = free.tokens[9]
    stopped = run(ahead, *(job(k, prompt_of(20), max_tokens=24, stop_token_ids=frozenset({stop})) for k in range(5)))
    for key in range(5):
        assert stopped[key].tokens == free.tokens[: free.tokens.index(stop)]
        assert stopped[key].ended.reason is EndReason.STOP
    assert ahead.stats().active_blocks == 0


def test_a_cancel_with_two_steps_in_flight_returns_every_block(late: EngineMaker) -> None:
    ahead = late()
    run(ahead, job(1, prompt_of(20), max_tokens=200), steps=10)
    ahead.cancel(1)
    output = ahead.step()
    assert [end.reason for end in output.ended] == [EndReason.CANCELLED]
    run(ahead)
    assert (ahead.stats().running, ahead.planner.leaving) == (0, [])
    ahead.check_integrity()
    assert ahead.stats().active_blocks == 0


def test_a_sequence_that_ends_in_flight_keeps_slot_and_blocks(late: EngineMaker) -> None:
    ahead = late()
    run(ahead, job(1, prompt_of(20), max_tokens=200), job(2, prompt_of(30), max_tokens=200), steps=10)
    sequence = next(s for s in ahead.planner.running if s.job.key == 1)
    assert ahead.planner.in_flight(sequence)
    ahead.planner.remove(sequence)
    assert sequence.slot is not None
    assert sequence.blocks
    ahead.check_integrity()
    ahead.planner.landed()
    assert not sequence.blocks
    ahead.check_integrity()


def test_preemptions_with_two_steps_in_flight_change_no_token(engine: EngineMaker, late: EngineMaker) -> None:
    jobs = [job(key, prompt_of(30 + key), max_tokens=40, bypass_cache=True) for key in range(8)]
    tight = late(kv_blocks=20, max_batch_size=8)
    same(run(tight, *jobs), run(engine(), *jobs))
    assert tight.stats().preemptions >= 1
