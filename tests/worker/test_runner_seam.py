"""The seam between engine and runner: rows that draw no, one or several tokens, blocks without contents, proposers."""

import threading
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason, Job
from services.worker.kvcache.tiers import BlockStore
from services.worker.options import EngineOptions, MemoryPlan
from services.worker.runners.base import Inspection, Masks, Runner, Sampled, StepResult
from services.worker.runners.paced import EqualChances, PacedRunner, PacedTiming
from services.worker.runners.step import Edit, SlotState, Words, unpack
from services.worker.speculative.proposer import Proposer
from tests.worker.drive import Recorded, job, prompt_of, run, solo

EOS = 1


class CountingRunner:
    """Answers 100, 101, 102, ... by position: as many tokens for each row that samples as `draws` says in turn.

    It asserts that it is sent what its slots need: each row begins where the slot's last row has ended.
    """

    kv = None

    def __init__(self, draws: Sequence[int], depth: int = 1, spoken: dict[int, int] | None = None) -> None:
        """spoken: other tokens at some positions."""
        self.depth, self.draws, self.spoken = depth, draws, spoken or {}
        self.samples = 0
        self.slots: dict[int, tuple[int, int]] = {}
        """Prompt and computed tokens of each."""

    def launch(self, words: Words) -> StepResult:
        edits, rows = unpack(words)
        for edit, slot, data in edits:
            if edit is Edit.ADMIT:
                state = SlotState.read(data)
                self.slots[slot] = state.prompt_len, state.computed
        drawn: list[list[int]] = []
        for slot, length, samples in zip(rows.slots, rows.lengths, rows.samples, strict=True):
            prompt_len, computed = self.slots[slot]
            computed += length
            if samples:
                count = self.draws[self.samples % len(self.draws)]
                self.samples += 1
                first = computed - prompt_len
                assert first >= 0, "a row samples before the end of its prompt"
                drawn.append([self.spoken.get(at, 100 + at) for at in range(first, first + count)])
                computed += count - 1
            self.slots[slot] = prompt_len, computed
        numbers = [[-0.5 * token for token in tokens] for tokens in drawn]
        tops = [[[(token, -0.5 * token)] for token in tokens] for tokens in drawn]
        return StepResult([True] * len(rows.slots), Sampled(drawn, numbers, tops))

    def draw(self, step: StepResult, masks: Masks) -> None:
        raise AssertionError("no slot has masks")

    def done(self, step: StepResult) -> bool:
        return True

    def collect(self, step: StepResult) -> StepResult:
        return step

    def run(self, words: Words) -> StepResult:
        return self.launch(words)

    def inspect(self, token_ids: Sequence[int]) -> Inspection:
        return EqualChances(len(token_ids), 200, [EOS])


def engine_on(runner: Runner[Any], eos: Collection[int] = (EOS,), **options: Any) -> GenerationEngine:
    """An engine on this runner, without a checkpoint."""
    made = EngineOptions(**{"max_batch_size": 4, "step_tokens": 32, "block_size": 4, **options})
    memory = MemoryPlan(0, 0, 0, 0, kv_blocks=64, kv_tokens=256, max_seq_length=128)
    return GenerationEngine(made, memory, runner, eos)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("draws", [[1], [3], [0, 1], [0, 1, 3], [3, 0, 0, 1], [2, 5]], ids=str)
def test_each_row_may_draw_its_own_number_of_tokens(draws: list[int], depth: int) -> None:
    engine = engine_on(CountingRunner(draws, depth))
    answers = run(engine, *(job(key, prompt_of(9 + 5 * key), max_tokens=11, logprobs=1) for key in range(6)))
    for answer in answers.values():
        assert answer.tokens == [100 + at for at in range(11)]
        assert answer.positions == list(range(11))
        assert answer.logprobs == [-0.5 * token for token in answer.tokens]
        assert answer.tops == [[(token, -0.5 * token)] for token in answer.tokens]
        assert (answer.ended.reason, answer.ended.position) == (EndReason.LENGTH, 11)
    assert engine.stats().active_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("position", range(6))
def test_tokens_after_an_end_are_dropped(position: int, depth: int) -> None:
    stopping = job(1, prompt_of(9), max_tokens=12, stop_token_ids=frozenset({100 + position}))
    answer = solo(engine_on(CountingRunner([3], depth)), stopping)
    assert answer.tokens == [100 + at for at in range(position)]
    assert (answer.ended.reason, answer.ended.stop_token_id) == (EndReason.STOP, 100 + position)
    assert answer.ended.position == position
    runner = CountingRunner([3], depth, spoken={position: EOS})
    ended = solo(engine_on(runner), job(1, prompt_of(9), max_tokens=12, ignore_eos=False))
    assert (ended.tokens, ended.ended.stop_token_id) == (answer.tokens, EOS)
    early = job(1, prompt_of(9), max_tokens=12, min_tokens=position + 1, stop_token_ids=frozenset({100 + position}))
    assert len(solo(engine_on(CountingRunner([3], depth)), early).tokens) == 12, "min_tokens forbids the end here"


def test_blocks_of_rows_with_several_tokens_are_found_again() -> None:
    engine = engine_on(CountingRunner([3, 1]))
    first = solo(engine, job(1, prompt_of(10), max_tokens=15))
    again = solo(engine, job(2, [*prompt_of(10), *first.tokens, 7], max_tokens=2))
    assert again.ended.cost.cached_tokens == 24, "all whole blocks of 25 tokens whose last one was never computed"


def test_preempted_answers_continue_at_their_position() -> None:
    jobs = [job(key, prompt_of(20 + key), max_tokens=40) for key in range(4)]
    made = EngineOptions(max_batch_size=4, step_tokens=32, block_size=4)
    memory = MemoryPlan(0, 0, 0, 0, kv_blocks=34, kv_tokens=136, max_seq_length=128)
    tight = GenerationEngine(made, memory, CountingRunner([0, 1, 3], depth=2), ())
    answers = run(tight, *jobs)
    assert tight.stats().preemptions > 0
    assert all(answer.tokens == [100 + at for at in range(40)] for answer in answers.values())


def test_an_engine_runs_without_contents_of_blocks() -> None:
    engine = engine_on(PacedRunner(200, [EOS], 4, PacedTiming(0.0)), host_kv_bytes=1 << 20)
    assert (engine.block_bytes, engine.block_layout) == (0, "")
    assert solo(engine, job(1, prompt_of(20), max_tokens=5)).ended.reason is EndReason.LENGTH
    assert solo(engine, job(2, prompt_of(20), max_tokens=5)).ended.cost.cached_tokens == 16
    store: Any = None
    remote: BlockStore = store
    with pytest.raises(AssertionError, match="blocks without contents"):
        engine.use_remote(remote)


def test_non_finite_values_fail_one_job_without_a_pool() -> None:
    class Broken(CountingRunner):
        def launch(self, words: Words) -> StepResult:
            return StepResult([False], super().launch(words).sampled)

    error = solo(engine_on(Broken([1])), job(1, prompt_of(5))).ended.error
    assert error is not None
    assert error.reason == "NUMERIC"


def test_events_are_reported_in_order() -> None:
    engine, events, stop = engine_on(CountingRunner([3])), Recorded(), threading.Event()
    engine.submit(job(1, prompt_of(5), max_tokens=7))
    thread = threading.Thread(target=engine.run, args=(events, stop))
    thread.start()
    assert events.ended.wait(10)
    stop.set()
    engine.wake()
    thread.join(5)
    assert [len(output.tokens) for output in events.outputs] == [3, 3, 1]
    assert len(events.predictions) == 3


def test_inspecting_a_paced_runner_gives_uniform_logits() -> None:
    logits = PacedRunner(200, [EOS], 4, PacedTiming(0.0)).inspect([5, 6, 7]).logits()
    assert logits.shape == (3, 200)
    assert set(logits[:, EOS]) == {float("-inf")}
    assert logits[:, 2:].any() == False  # noqa: E712 - an array's


class RepeatingProposer:
    """Proposes the tokens that followed the previous occurrence of the last token."""

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        earlier = [at for at in range(len(token_ids) - 1) if token_ids[at] == token_ids[-1]]
        return token_ids[earlier[-1] + 1 :][:most] if earlier else []

    def ended(self, job: Job, token_ids: Sequence[int]) -> None:
        pass


def test_a_proposer_drafts_from_the_tokens_so_far() -> None:
    proposer: Proposer = RepeatingProposer()
    one = job(1, [1])
    assert list(proposer.propose(one, [1, 2, 3, 4, 2], 2)) == [3, 4]
    assert list(proposer.propose(one, [1, 2, 3], 2)) == []
