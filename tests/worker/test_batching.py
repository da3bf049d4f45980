"""The planner: decode first, budget kept, fair admission, preemption without starvation, prefixes computed once."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.job import Job, SamplingParams
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import MOST_PREEMPTIONS, Plan, Planner
from services.worker.planner.sequence import Sequence
from services.worker.planner.token_budget import TokenBudget

BLOCK = 4


class Stage:
    """A batch with a fake device: each sampled token is the next random number."""

    def __init__(self, blocks: int = 100, slots: int = 8, step_tokens: int = 16, prefix_cache: bool = True) -> None:
        self.pool = BlockPool(blocks)
        self.batch = Planner(self.pool, BLOCK, slots, step_tokens, prefix_cache)
        self.arrivals = 0
        self.random = random.Random(0)

    def sequence(self, tokens: list[int], max_tokens: int = 8, **job: Any) -> Sequence:
        self.arrivals += 1
        one = Job(self.arrivals, tokens, len(tokens), SamplingParams(max_tokens), **job)
        return Sequence(one, self.arrivals, BLOCK, 1000, b"")

    def add(self, tokens: list[int], max_tokens: int = 8, **job: Any) -> Sequence:
        sequence = self.sequence(tokens, max_tokens, **job)
        assert self.batch.fits(sequence)
        self.batch.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.batch.plan()
        assert sum(row.tokens for row in plan.rows) == self.batch.step_tokens - plan.budget <= self.batch.step_tokens
        for row in plan.rows:
            assert len(row.sequence.blocks) * BLOCK >= row.start + row.tokens, "a row has no block for its tokens"
            self.batch.commit(row, [self.random.randrange(1000)] if row.samples else [])
            if len(row.sequence.tokens) >= row.sequence.limit:
                self.batch.remove(row.sequence)
        self.batch.check()
        return plan

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not (self.batch.running or self.batch.waiting):
                return
            plan = self.step()
            assert plan.rows or self.batch.waiting, "no progress"
        raise AssertionError("some sequence never ends")


def shares(plan: Plan) -> list[tuple[int, int, int]]:
    return [(row.sequence.job.key, row.tokens, row.samples) for row in plan.rows]


def test_prompts_are_cut_to_the_budget_and_answers_go_first() -> None:
    stage = Stage(step_tokens=10)
    stage.add(list(range(6)))
    stage.add(list(range(100, 113)))
    assert shares(stage.step()) == [(1, 6, True), (2, 4, False)]
    assert shares(stage.step()) == [(1, 1, True), (2, 9, True)]
    assert shares(stage.step()) == [(1, 1, True), (2, 1, True)]


def test_higher_priority_then_earlier_arrival_is_admitted_first() -> None:
    stage = Stage(slots=2)
    for priority in (0, 5, 0, 5):
        stage.add([priority, stage.arrivals, 1, 2, 3], priority=priority)
    assert [key for key, _, _ in shares(stage.step())] == [2, 4]
    assert [s.job.key for s in stage.batch.waiting] == [1, 3]


def test_a_prefix_of_several_waiting_jobs_is_computed_once() -> None:
    stage = Stage(step_tokens=16)
    prompt = list(range(22))
    for _ in range(3):
        stage.add(prompt)
    stage.add(list(range(500, 503)))
    assert shares(stage.step()) == [(1, 16, False)]
    assert shares(stage.step()) == [(1, 6, True), (4, 3, True)], "other jobs overtake those that wait for the leader"
    assert shares(stage.step()) == [(1, 1, True), (4, 1, True), (2, 2, True), (3, 2, True)]
    assert stage.batch.running[1].cached_tokens == 20


def test_the_blocks_that_a_step_makes_whole_are_known_while_it_runs() -> None:
    stage = Stage(step_tokens=16)
    first, second = stage.add(list(range(22))), stage.add(list(range(50, 80)))
    keys, others = first.keys.first(5), second.keys.first(7)
    assert stage.batch.computing(keys, []) == []
    plan = stage.batch.plan()
    assert stage.batch.computing(keys, plan.rows) == first.blocks[:4]
    assert stage.batch.computing([*keys[1:3], *others], plan.rows) == first.blocks[1:3]
    assert stage.batch.computing(others, plan.rows) == []
    ahead = stage.batch.plan()
    assert shares(ahead) == [(1, 6, True), (2, 10, False)]
    assert stage.batch.computing(keys, plan.rows) == first.blocks[:4], "not those of the next step"
    for row in plan.rows:
        stage.batch.commit(row, [])
    stage.batch.publish()
    assert stage.batch.computing(keys, ahead.rows) == []
    assert stage.batch.computing(keys[4:], ahead.rows) == first.blocks[4:5]
    assert stage.batch.computing(others, ahead.rows) == second.blocks[:2]
    assert stage.batch.computing(others, ahead.rows[:1]) == []


def test_jobs_that_wait_for_a_leader_continue_when_it_ends() -> None:
    stage = Stage(step_tokens=8)
    leader = stage.add(list(range(20)))
    follower = stage.add(list(range(20)))
    stage.step()
    assert follower.slot is None
    stage.batch.remove(leader)
    plan = stage.step()
    assert shares(plan) == [(2, 8, False)]
    assert follower.cached_tokens == 8


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    stage = Stage()
    for _ in range(2):
        stage.add(list(range(8)), max_tokens=1)
        stage.run()
    again = stage.add(list(range(8)), max_tokens=1)
    assert shares(stage.step()) == [(3, 4, True)]
    assert again.cached_tokens == 4


def test_a_job_that_bypasses_the_cache_neither_reads_nor_stores_blocks() -> None:
    stage = Stage()
    stage.add(list(range(12)), bypass_cache=True)
    stage.run()
    assert stage.pool.cached == 0
    stage.add(list(range(12)))
    stage.run()
    cached = stage.pool.cached
    assert cached > 0
    bypassing = stage.add(list(range(12)), bypass_cache=True)
    stage.run()
    assert bypassing.cached_tokens == 0
    assert stage.pool.cached == cached


def test_jobs_with_different_salts_share_no_block() -> None:
    stage = Stage()
    stage.add(list(range(12)), salt=b"a")
    stage.run()
    stranger = stage.add(list(range(12)), salt=b"b")
    friend = stage.add(list(range(12)), salt=b"a")
    stage.run()
    assert (stranger.cached_tokens, friend.cached_tokens) == (0, 8)


def test_when_blocks_run_out_the_last_in_the_queue_is_preempted() -> None:
    stage = Stage(blocks=5, prefix_cache=False)
    important = stage.add([1] * 7, max_tokens=9, priority=1)
    first = stage.add([2] * 3, max_tokens=9)
    second = stage.add([3] * 3, max_tokens=9)
    stage.step()
    stage.step()
    plan = stage.step()
    assert [key for key, _, _ in shares(plan)] == [important.job.key, first.job.key]
    assert (second.preemptions, second.slot, second.blocks) == (1, None, [])
    assert stage.batch.waiting == [second]
    stage.run()
    assert len(second.tokens) == 12


def test_a_sequence_is_preempted_at_most_three_times() -> None:
    """One long answer beside a stream of jobs with higher priority that need its blocks."""
    stage = Stage(blocks=18, prefix_cache=False)
    humble = stage.add([1] * 4, max_tokens=60)
    for guest in range(15):
        if len(humble.tokens) == humble.limit:
            break
        while humble.slot is None:
            stage.step()
        for _ in range(2):
            stage.add([guest] * 12, max_tokens=16, priority=1)
        for _ in range(3):
            stage.step()
        if humble.preemptions == MOST_PREEMPTIONS and humble.slot is not None:
            assert len(humble.blocks) == humble.most_blocks, "the sequence holds every block that it can need"
    stage.run()
    assert humble.preemptions == 3
    assert len(humble.tokens) == humble.limit


def test_cached_blocks_are_evicted_before_a_sequence_is_preempted() -> None:
    stage = Stage(blocks=6)
    stage.add(list(range(16)), max_tokens=1)
    stage.run()
    assert stage.pool.cached == 4
    stage.add(list(range(100, 116)), max_tokens=8)
    stage.run()
    assert stage.batch.preemptions == 0


def test_a_sequence_that_can_never_fit_is_recognized() -> None:
    stage = Stage(blocks=4)
    assert stage.batch.fits(stage.sequence([1] * 9, max_tokens=8))  # the last token needs no key and value
    assert not stage.batch.fits(stage.sequence([1] * 9, max_tokens=9))


def test_a_slot_starves_if_the_budget_is_smaller_than_the_batch() -> None:
    with pytest.raises(ValueError, match="step_tokens 3 is less than max_batch_size 4"):
        Stage(slots=4, step_tokens=3)


def test_withdrawn_blocks_are_not_found() -> None:
    stage = Stage()
    sequence = stage.add(list(range(8)), max_tokens=20)
    for _ in range(10):
        stage.step()
    tokens = sequence.tokens[:16]
    assert len(stage.pool.match(sequence.keys.first(4))) == 4
    stage.batch.cut(sequence, 9)
    stage.batch.remove(sequence)
    assert stage.pool.cached == 2
    late = stage.add(tokens)
    stage.step()
    assert late.cached_tokens == 8


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_jobs_all_end_and_no_block_is_lost(data: st.DataObject) -> None:
    """Random jobs, arrivals and cancels in a small pool: all end, each is preempted at most 3 times, counts agree."""
    slots = data.draw(st.integers(1, 5), "slots")
    stage = Stage(
        blocks=data.draw(st.integers(6, 14), "blocks"),
        slots=slots,
        step_tokens=data.draw(st.integers(slots, 20), "step_tokens"),
        prefix_cache=data.draw(st.booleans(), "prefix_cache"),
    )
    everyone: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 12), "jobs")):
        stem = data.draw(st.integers(0, 1), "stem")
        prompt = [stem] * data.draw(st.integers(1, 13), "prompt")
        sequence = stage.sequence(
            prompt,
            data.draw(st.integers(1, 11), "max_tokens"),
            priority=data.draw(st.integers(0, 1), "priority"),
            bypass_cache=data.draw(st.booleans(), "bypass"),
        )
        if not stage.batch.fits(sequence):
            continue
        everyone.append(sequence)
        stage.batch.add(sequence)
        for _ in range(data.draw(st.integers(0, 4), "steps")):
            stage.step()
        if data.draw(st.integers(0, 9), "cancel") == 0 and (stage.batch.running or stage.batch.waiting):
            victim = data.draw(st.sampled_from([*stage.batch.running, *stage.batch.waiting]), "victim")
            stage.batch.cut(victim, len(victim.job.token_ids))
            stage.batch.remove(victim)
            everyone.remove(victim)
            stage.batch.check()
    stage.run()
    assert all(len(sequence.tokens) == sequence.limit for sequence in everyone)
    assert all(sequence.preemptions <= MOST_PREEMPTIONS for sequence in everyone)
    assert stage.pool.active == 0


# ---- prompts beside answers ----


def crowded(answers: int, chunk_tokens: int | None) -> Planner:
    """A planner with `answers` decoding sequences and steps of up to 8,192 tokens."""
    batch = Planner(BlockPool(20_000), 16, 256, 8192, False, chunk_tokens)
    for number in range(answers):
        batch.add(Sequence(Job(number, [1] * 4, 4, SamplingParams(max_tokens=500)), number, 16, 16384, b""))
    while any(sequence.remaining != 1 for sequence in batch.running) or batch.waiting:
        batch.plan()
        for sequence in batch.running:
            sequence.tokens += [1] * (sequence.total - len(sequence.tokens))
    return batch


def prompt_tokens(batch: Planner, prompts: int) -> int:
    """Prompt tokens in the next step after `prompts` prompts of 8,000 tokens have arrived."""
    for number in range(1000, 1000 + prompts):
        batch.add(Sequence(Job(number, [1] * 8000, 8000, SamplingParams(max_tokens=5)), number, 16, 16384, b""))
    return sum(row.tokens for row in batch.plan().rows if row.tokens > 1)


def test_one_prompt_beside_many_answers_takes_a_small_share_of_a_step() -> None:
    assert prompt_tokens(crowded(32, 200), 1) == 256 - 32
    assert prompt_tokens(crowded(100, 200), 1) == 320 - 100


def test_the_chunks_of_a_long_prompt_shrink_with_its_context() -> None:
    batch = crowded(32, 200)
    chunks = [prompt_tokens(batch, 1)]
    while chunks[-1]:
        for sequence in batch.running:
            sequence.tokens += [1] * (sequence.total - len(sequence.tokens))
        chunks.append(prompt_tokens(batch, 0))
    assert set(chunks[:10]) == {256 - 32}
    assert set(chunks[-10:-2]) == {192 - 32}, "a chunk after 6,500 tokens"
    assert sum(chunks) == 8000


def test_several_waiting_prompts_take_more_of_a_step() -> None:
    assert prompt_tokens(crowded(100, 200), 2) == 960 - 100
    assert prompt_tokens(crowded(60, 200), 5) == 3840 - 60


def test_steps_of_a_backlog_grow_with_the_keys_that_answers_read() -> None:
    assert prompt_tokens(crowded(100, 200), 25) == 6400 - 100
    assert prompt_tokens(crowded(120, 200), 30) == 7680 - 120


def test_the_last_prompts_of_a_backlog_get_the_same_share_as_the_first() -> None:
    shares = TokenBudget(200, 8192)
    assert shares.step(range(30), 0, 100, 100) == 6400
    assert shares.step([29], 0, 100, 100) == 6400, "the prompt was part of the backlog"
    assert shares.step([29, 30], 0, 100, 100) == 6400
    assert shares.step([30], 0, 100, 100) == 320, "the prompt arrived after the backlog"


def test_prompts_take_the_whole_step_while_most_jobs_wait_for_a_first_token() -> None:
    assert prompt_tokens(crowded(7, 200), 49) == 8192 - 7
    assert prompt_tokens(crowded(7, 200), 48) == 2048 - 7
    assert prompt_tokens(crowded(2, 200), 1) == 8000
    assert prompt_tokens(crowded(0, 200), 1) == 8000


def test_answers_of_a_step_in_flight_do_not_end_a_burst() -> None:
    batch = Planner(BlockPool(20_000), 16, 256, 8192, False, 200)
    for number in range(8):
        batch.add(Sequence(Job(number, [1] * 500, 500, SamplingParams(max_tokens=5)), number, 16, 16384, b""))
    batch.plan()  # Their first tokens are in flight when the other prompts arrive.
    assert prompt_tokens(batch, 24) == 8192 - 8


def test_several_prompts_take_the_whole_step_beside_few_answers() -> None:
    assert prompt_tokens(crowded(6, 200), 3) == 8192 - 6
    assert prompt_tokens(crowded(6, 200), 2) == 2048 - 6
    assert prompt_tokens(crowded(7, 200), 4) == 2048 - 7


def test_the_last_prompts_of_a_burst_get_the_same_share_as_the_first() -> None:
    shares = TokenBudget(200, 8192)
    assert shares.step(range(40), 0, 5, 5) == 8192
    assert shares.step([39, 40], 0, 30, 30) == 8192, "one prompt was waiting"
    assert shares.step([40], 0, 30, 30) == 256


def test_prompts_without_a_slot_do_not_count_as_waiting() -> None:
    assert prompt_tokens(crowded(255, 200), 100) == 512 - 255


def test_without_a_bound_a_prompt_takes_the_rest_of_the_step() -> None:
    assert prompt_tokens(crowded(200, None), 2) == 8192 - 200
