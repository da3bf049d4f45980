"""The engine beside its tokens: ends, costs, cancels, isolated failures, and counts of blocks."""

import threading
import time
from typing import Any

import pytest
import torch

from services import hashing
from services.worker.engine import generation
from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason
from services.worker.options import EngineOptions
from services.worker.runners.step import Words, unpack
from tests.checkpoints import EOS
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, Recorded, decoder_of, job, prompt_of, run, solo


@pytest.fixture(scope="module")
def shared(engine: EngineMaker) -> GenerationEngine:
    """An engine shared by tests that leave nothing but cached blocks."""
    return engine()


def free_again(engine: GenerationEngine) -> bool:
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.active_blocks) == (0, 0, 0)


# ---- ends ----


def test_an_answer_ends_at_max_tokens(shared: GenerationEngine) -> None:
    answer = solo(shared, job(1, prompt_of(20), max_tokens=5))
    assert answer.positions == [0, 1, 2, 3, 4]
    assert (answer.ended.reason, answer.ended.position) == (EndReason.LENGTH, 5)
    assert free_again(shared)


def test_an_answer_ends_at_the_end_of_the_context(engine: EngineMaker) -> None:
    answer = solo(engine(max_seq_length=24), job(1, prompt_of(20), max_tokens=50))
    assert (answer.ended.reason, len(answer.tokens)) == (EndReason.LENGTH, 4)


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(shared: GenerationEngine) -> None:
    free = solo(shared, job(1, prompt_of(20), max_tokens=12))
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    stopped = solo(shared, job(2, prompt_of(20), max_tokens=12, stop_token_ids=frozenset({stop})))
    assert stopped.tokens == free.tokens[:first]
    assert (stopped.ended.reason, stopped.ended.stop_token_id) == (EndReason.STOP, stop)
    assert stopped.ended.position == first


def test_the_models_end_token_ends_the_answer_unless_ignored(shared: GenerationEngine) -> None:
    eager: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "max_tokens": 3}
    ended = solo(shared, job(1, prompt_of(9), ignore_eos=False, **eager))
    assert (ended.tokens, ended.ended.reason, ended.ended.stop_token_id) == ([], EndReason.STOP, EOS)
    assert solo(shared, job(2, prompt_of(9), ignore_eos=True, **eager)).tokens == [EOS] * 3


def test_min_tokens_forbids_end_and_stop_tokens_before(shared: GenerationEngine) -> None:
    eager: dict[str, Any] = {"logit_bias": {EOS: 100.0, 7: 90.0}, "max_tokens": 9, "stop_token_ids": frozenset({7})}
    answer = solo(shared, job(1, prompt_of(9), ignore_eos=False, min_tokens=4, **eager))
    assert len(answer.tokens) == 4
    assert not {EOS, 7} & set(answer.tokens)
    assert answer.ended.stop_token_id == EOS


def test_a_moved_job_continues_at_its_position(shared: GenerationEngine) -> None:
    whole = solo(shared, job(1, prompt_of(30), max_tokens=20, temperature=1.0, seed=3))
    moved = solo(shared, job(2, prompt_of(30), emitted=whole.tokens[:8], max_tokens=20, temperature=1.0, seed=3))
    assert moved.positions == list(range(8, 20))
    assert moved.tokens == whole.tokens[8:]


def test_a_moved_job_that_was_done_ends_at_once(shared: GenerationEngine) -> None:
    answer = solo(shared, job(1, prompt_of(30), emitted=[5, 6, 7], max_tokens=3))
    assert (answer.tokens, answer.ended.reason, answer.ended.position) == ([], EndReason.LENGTH, 3)


def test_the_penalties_of_a_moved_job_count_its_earlier_tokens(shared: GenerationEngine) -> None:
    settings: dict[str, Any] = {
        "max_tokens": 24,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
    }
    whole = solo(shared, job(1, prompt_of(30), **settings))
    assert whole.tokens != solo(shared, job(2, prompt_of(30), max_tokens=24)).tokens
    moved = solo(shared, job(3, prompt_of(30), emitted=whole.tokens[:10], **settings))
    assert moved.tokens == whole.tokens[10:]


def test_an_expired_job_ends_without_a_step(shared: GenerationEngine) -> None:
    steps = shared.stats().steps
    answer = solo(shared, job(1, prompt_of(30), deadline=time.monotonic() - 1))
    assert (answer.tokens, answer.ended.reason) == ([], EndReason.DEADLINE)
    assert shared.stats().steps == steps
    assert free_again(shared)


def test_a_deadline_in_the_middle_ends_the_answer(shared: GenerationEngine) -> None:
    answer = solo(shared, job(1, prompt_of(30), max_tokens=400, deadline=time.monotonic() + 0.05))
    assert answer.ended.reason is EndReason.DEADLINE
    assert 0 < len(answer.tokens) < 400
    assert free_again(shared)


@pytest.mark.parametrize("prompt", [[], [5] * 512, [5] * 600])
def test_a_prompt_without_room_for_an_answer_is_refused(shared: GenerationEngine, prompt: list[int]) -> None:
    error = solo(shared, job(1, prompt)).ended.error
    assert error is not None
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID")


def test_a_job_that_could_never_fit_is_refused(engine: EngineMaker) -> None:
    small = engine(kv_blocks=8)
    refused = solo(small, job(1, prompt_of(100), max_tokens=100)).ended
    assert refused.error is not None
    assert (refused.reason, refused.error.reason) == (EndReason.ERROR, "KV_EXHAUSTED")
    assert len(solo(small, job(2, prompt_of(100), max_tokens=29)).tokens) == 29


# ---- costs ----


def test_the_cost_of_a_job_has_its_times_and_tokens(engine: EngineMaker) -> None:
    chunky = engine(max_batch_size=2, step_tokens=16)
    run(chunky, job(1, prompt_of(40), max_tokens=2))
    cost = run(chunky, job(2, [*prompt_of(40)[:32], *prompt_of(40, seed=1)], max_tokens=6))[2].ended.cost
    assert (cost.cached_tokens, cost.prefill_tokens, cost.prefill_steps, cost.steps) == (32, 40, 3, 8)
    assert cost.preemptions == 0
    assert min(cost.prefill_s, cost.decode_s) > 0
    assert cost.queue_s >= 0


def test_the_gauges_follow_running_and_waiting_jobs(engine: EngineMaker) -> None:
    fresh = engine(max_batch_size=2, step_tokens=32, warm_up=True)
    before = fresh.stats()
    assert (before.steps, before.running, before.waiting, before.preemptions) == (0, 0, 0, 0)
    assert before.free_blocks == before.total_blocks
    assert min(before.decode_s, before.prefill_rate) > 0, "the warm-up has measured the step times"
    for key in range(3):
        fresh.submit(job(key, prompt_of(50, seed=key), max_tokens=4))
    fresh.step()
    stats = fresh.stats()
    assert (stats.running, stats.waiting) == (1, 2)
    assert stats.prefill_backlog == 18 + 50 + 50
    assert stats.predicted_step_s > 0
    run(fresh)
    assert fresh.stats().predicted_step_s == 0
    assert free_again(fresh)


# ---- cancelling and the prefix cache ----


def test_cancelling_64_streams_returns_every_block(engine: EngineMaker) -> None:
    wide = engine(kv_blocks=600)
    run(wide, *(job(key, prompt_of(10 + key), max_tokens=200) for key in range(64)), steps=20)
    assert wide.stats().running == 64
    for key in range(64):
        wide.cancel(key, 3)
    answers = run(wide)
    assert {answers[key].ended.reason for key in range(64)} == {EndReason.CANCELLED}
    assert free_again(wide)
    wide.check_integrity()


def test_a_cancel_of_an_unknown_or_ended_job_is_ignored(shared: GenerationEngine) -> None:
    shared.cancel(12345, 0)
    assert run(shared) == {}


def test_blocks_beyond_the_position_of_a_cancel_are_not_found(engine: EngineMaker) -> None:
    fresh = engine()
    prompt = prompt_of(32)
    said = run(fresh, job(1, prompt, max_tokens=200), steps=60)[1].tokens
    fresh.cancel(1, 20)
    run(fresh)
    later = solo(fresh, job(2, [*prompt, *said, 9]))
    assert later.ended.cost.cached_tokens == 48  # 32 + 20 tokens are three whole blocks


def test_stored_and_evicted_blocks_are_reported_by_their_keys(engine: EngineMaker) -> None:
    small = engine(kv_blocks=6, fingerprint=b"model")
    prompt = prompt_of(40)
    run(small, job(1, prompt, max_tokens=1, salt=b"tenant"))
    keys = list(hashing.block_keys(prompt, 16, hashing.chain_root(b"tenant", b"model")))
    assert small.take_block_events() == (keys, [])
    assert small.take_block_events() == ([], [])
    run(small, job(2, prompt_of(75), max_tokens=1, salt=b"tenant"))
    stored, evicted = small.take_block_events()
    assert (len(stored), evicted) == (4, [keys[1]])


def test_several_samples_of_one_prompt_compute_it_once(shared: GenerationEngine) -> None:
    prompt = prompt_of(100, seed=8)
    jobs = [job(key, prompt, temperature=1.0, sample_index=key) for key in range(4)]
    answers = run(shared, *jobs)
    assert [answers[key].ended.cost.cached_tokens for key in range(4)] == [0, 96, 96, 96]
    assert len({tuple(answers[key].tokens) for key in range(4)}) == 4


def test_without_the_prefix_cache_no_block_is_kept(engine: EngineMaker) -> None:
    plain = engine(prefix_cache=False)
    for key in range(2):
        assert solo(plain, job(key, prompt_of(50))).ended.cost.cached_tokens == 0
    assert plain.stats().cached_blocks == 0


# ---- isolated failures ----

POISON = 300


@pytest.fixture
def poisoned(engine: EngineMaker) -> GenerationEngine:
    """An engine whose model has no finite values for one token."""
    made = engine(step_tokens=64)
    decoder_of(made).model.embedding[POISON] = torch.nan
    return made


def test_non_finite_values_fail_one_job_and_reach_no_other(poisoned: GenerationEngine) -> None:
    healthy = [job(key, [t for t in prompt_of(30 + key) if t != POISON], logprobs=0) for key in range(4)]
    expected = run(poisoned, *healthy)
    sick = prompt_of(100)
    sick[3] = POISON
    answers = run(poisoned, job(9, sick), *healthy)
    failed = answers[9].ended
    assert failed.error is not None
    assert (failed.reason, failed.error.reason, answers[9].tokens) == (EndReason.ERROR, "NUMERIC", [])
    assert [answers[k].tokens for k in range(4)] == [expected[k].tokens for k in range(4)]
    layers = decoder_of(poisoned).kv.layers
    assert all(bool(torch.isfinite(layer).all()) for layer in layers), "a later owner of the block would read NaN"
    again = solo(poisoned, job(10, sick)).ended
    assert again.cost.cached_tokens == 0, "no block of the failed job may be found"


def test_a_job_that_breaks_the_step_fails_alone(engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    fragile = engine()
    expected = run(fragile, *(job(key, prompt_of(20 + key), bypass_cache=True) for key in range(7)))
    original = fragile.runner.launch

    def break_on_poison(words: Words) -> Any:
        if POISON in unpack(words)[1].ids:
            raise RuntimeError("the words of the request")
        return original(words)

    monkeypatch.setattr(fragile.runner, "launch", break_on_poison)
    jobs = [job(key, prompt_of(20 + key), bypass_cache=True) for key in range(7)]
    answers = run(fragile, *jobs[:3], job(99, [5, POISON, 6]), *jobs[3:])
    failed = answers[99].ended
    assert failed.error is not None
    assert (failed.error.reason, failed.error.retryable) == ("INTERNAL", True)
    assert "words of the request" not in failed.error.message
    assert [answers[k].tokens for k in range(7)] == [expected[k].tokens for k in range(7)]
    assert free_again(fragile)


def test_values_that_do_not_fit_the_packed_step_fail_one_job(shared: GenerationEngine) -> None:
    answers = run(shared, job(1, prompt_of(9), temperature=1.0, top_k=1 << 40), job(2, prompt_of(9)))
    error = answers[1].ended.error
    assert error is not None
    assert error.reason == "INTERNAL"
    assert len(answers[2].tokens) == 16
    assert free_again(shared)


# ---- precision ----


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.04)])
def test_half_precision_stays_near_full_precision(engine: EngineMaker, dtype: str, tolerance: float) -> None:
    one = job(1, prompt_of(40), max_tokens=1, logprobs=5)
    full, half = solo(engine("qwen3"), one).tops[0], solo(engine("qwen3", dtype=dtype), one).tops[0]
    assert full is not None
    assert half is not None
    assert full != half
    assert dict(half)[full[0][0]] == pytest.approx(full[0][1], abs=tolerance)


# ---- the loop ----


def test_the_loop_sleeps_until_there_is_work(engine: EngineMaker) -> None:
    fresh = engine()
    events, stop = Recorded(), threading.Event()
    thread = threading.Thread(target=fresh.run, args=(events, stop))
    thread.start()
    time.sleep(0.2)
    assert events.outputs == [], "an idle engine reports nothing"
    fresh.submit(job(1, prompt_of(10), max_tokens=6))
    assert events.ended.wait(10)
    assert sum(len(output.tokens) for output in events.outputs) == 6
    assert len(events.predictions) == len(events.outputs) == 6
    assert all(prediction > 0 for prediction in events.predictions)
    stop.set()
    fresh.wake()
    thread.join(5)
    assert not thread.is_alive()


def test_first_tokens_of_a_large_step_are_delivered_before_its_others(
    engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(key, prompt_of(20, seed=key), max_tokens=6) for key in range(5)]
    expected = run(engine(step_tokens=64), *jobs)
    monkeypatch.setattr(generation, "_LARGE_STEP", 5)
    fresh = engine(step_tokens=64)
    for each in jobs:  # The budget lets three prompts begin in the first step, and two beside them in the second.
        fresh.submit(each)
    events, stop = Recorded(), threading.Event()
    thread = threading.Thread(target=fresh.run, args=(events, stop))
    thread.start()
    answers = {each.key: Answer() for each in jobs}
    assert events.wait_for_ends(5)
    stop.set()
    fresh.wake()
    thread.join()
    for output in events.outputs:
        for token in output.tokens:
            answers[token.key].add(token)
    places = [[(token.key, token.position) for token in output.tokens] for output in events.outputs[:3]]
    assert places == [[(0, 0), (1, 0), (2, 0)], [(3, 0), (4, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert {key: answer.tokens for key, answer in answers.items()} == {
        key: answer.tokens for key, answer in expected.items()
    }
    assert fresh.stats().active_blocks == 0


def test_an_engine_takes_its_threads_from_the_options(engine: EngineMaker) -> None:
    assert EngineOptions().threads is None
    before = torch.get_num_threads()
    try:
        engine(threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_step_reports_each_job_once(shared: GenerationEngine) -> None:
    for key in range(5):
        shared.submit(job(key, prompt_of(12, seed=key), max_tokens=3))
    answers = {key: Answer() for key in range(5)}
    while shared.has_work():
        output = shared.step()
        keys = [token.key for token in output.tokens]
        assert len(keys) == len(set(keys))
        for token in output.tokens:
            answers[token.key].add(token)
    assert all(answer.positions == [0, 1, 2] for answer in answers.values())
