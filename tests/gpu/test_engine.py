"""The GPU engine gives the reference engine's answers: with graphs, overlap, chunks, cache hits, preemptions, draws."""

import gc
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from kernels.device import is_hopper
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason, Job
from services.worker.options import EngineOptions
from services.worker.runners.cuda.graphs import Graph
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.step_words import Kind
from tests.checkpoints import EOS, SHAPES, VOCAB
from tests.gpu.conftest import EngineMaker
from tests.worker.drive import Answer, decoder_of, job, prompt_of, run, solo
from tests.worker.test_prompt_logprobs import scores_of
from tests.worker.test_tiers import slow_prefill

TOKENS = 48
PROMPTS = [prompt_of(length, vocab=VOCAB) for length in (1, 7, 16, 17, 33, 50, 64, 90)]
TOLERANCE = 2e-4

Answers = dict[int, Answer]


@pytest.fixture(scope="module", params=[*SHAPES, "demo"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def jobs(*, first_key: int = 0, **settings: Any) -> list[Job]:
    """A greedy job for each prompt."""
    return [job(first_key + i, p, max_tokens=TOKENS, logprobs=2, **settings) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def reference(shape: str, engine: EngineMaker) -> Answers:
    return run(engine(shape, engine="torch"), *jobs(bypass_cache=True))


@pytest.fixture(scope="module")
def exact(shape: str, engine: EngineMaker) -> GenerationEngine:
    """A GPU engine in float32, graphs and overlap on."""
    return engine(shape)


def assert_equal(answers: Answers, reference: Answers, first_key: int = 0) -> None:
    for key, expected in reference.items():
        answer = answers[first_key + key]
        assert answer.tokens == expected.tokens, f"prompt {key}"
        assert answer.positions == expected.positions
        assert answer.ended.reason is expected.ended.reason
        for mine, its in zip(answer.logprobs, expected.logprobs, strict=True):
            assert mine is not None
            assert its is not None
            assert abs(mine - its) <= TOLERANCE
        for got, want in zip(answer.tops, expected.tops, strict=True):
            assert got is not None
            assert want is not None
            assert dict(got).keys() == dict(want).keys() or abs(want[0][1] - want[1][1]) < TOLERANCE or len(want) == 2


# ---- float32: the same tokens ----


def test_greedy_answers_in_one_batch(exact: GenerationEngine, reference: Answers) -> None:
    assert_equal(run(exact, *jobs(bypass_cache=True)), reference)


def test_greedy_answers_one_by_one(exact: GenerationEngine, reference: Answers) -> None:
    answers: Answers = {}
    for one in jobs(bypass_cache=True):
        answers |= run(exact, one)
    assert_equal(answers, reference)


def test_after_a_prefix_hit(exact: GenerationEngine, reference: Answers) -> None:
    run(exact, *jobs())
    answers = run(exact, *jobs(first_key=50))
    assert_equal(answers, reference, first_key=50)
    for index, prompt in enumerate(PROMPTS):
        assert answers[50 + index].ended.cost.cached_tokens == (len(prompt) - 1) // 16 * 16


def test_with_chunked_prefill_and_preemptions(shape: str, engine: EngineMaker, reference: Answers) -> None:
    small = engine(shape, kv_blocks=26, max_batch_size=8, step_tokens=11, chunk_tokens=5)
    answers = run(small, *jobs(bypass_cache=True))
    assert_equal(answers, reference)
    assert max(answers[i].ended.cost.prefill_steps for i in answers) >= 5
    assert small.stats().preemptions >= 1
    small.check_integrity()


def test_after_a_prefix_moved_to_host_memory_and_back(shape: str, engine: EngineMaker, reference: Answers) -> None:
    small = engine(shape, kv_blocks=26, max_batch_size=4, host_kv_bytes=64 << 20)
    slow_prefill(small)
    run(small, *jobs())
    for seed in range(4):
        run(small, job(200 + seed, prompt_of(200, seed=seed + 9, vocab=VOCAB), max_tokens=8))
    spilled = small.prefixes.counts.spilled
    assert spilled >= 20
    longest = len(PROMPTS) - 1
    answers = run(small, jobs(first_key=50)[longest])
    assert_equal(answers, {longest: reference[longest]}, first_key=50)
    assert answers[50 + longest].ended.cost.fetched_tokens == (len(PROMPTS[longest]) - 1) // 16 * 16
    small.check_integrity()


# ---- draws and settings ----

_DRAW = random.Random(3)
BAD = tuple(tuple(_DRAW.randrange(VOCAB) for _ in range(1 + count % 3)) for count in range(128))
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 10, "seed": 2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 3},
    {"temperature": 1.2, "min_p": 0.05, "seed": 1 << 63},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5, "sample_index": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    {"logit_bias": {5: 4.0, 9: -3.0}, "logprobs": 0},
    {"logit_bias": {EOS: 8.0}, "min_tokens": 12, "ignore_eos": False},
    {"temperature": 1.0, "seed": 9, "logprobs": 5},
    {"bad_sequences": BAD, "min_tokens": 5, "logit_bias": {9: 2.0}, "ignore_eos": False},
    {"temperature": 1.0, "seed": 4, "bad_sequences": BAD[100:]},
]


def test_draws_penalties_and_bans_are_those_of_the_cpu(engine: EngineMaker) -> None:
    wanted = [job(key, prompt_of(20 + key), max_tokens=40, **settings) for key, settings in enumerate(SETTINGS)]
    expected, answers = run(engine(engine="torch"), *wanted), run(engine(), *wanted)
    for key, settings in enumerate(SETTINGS):
        assert answers[key].tokens == expected[key].tokens, settings
        assert answers[key].ended.reason is expected[key].ended.reason


def test_log_probabilities_of_prompts_are_those_of_the_cpu(engine: EngineMaker) -> None:
    wanted = [job(key, prompt_of(1 + 70 * key), max_tokens=4, prompt_logprobs=key) for key in range(5)]
    (expected, answers), (found, same) = (scores_of(each, *wanted) for each in (engine(engine="torch"), engine()))
    assert same == answers
    assert found.keys() == expected.keys()
    for key, (logprobs, tops) in found.items():
        torch.testing.assert_close(logprobs, expected[key][0], rtol=0, atol=2e-3)
        assert [len(top) for top in tops] == [key] * (70 * key)
        for top, other in zip(tops, expected[key][1], strict=True):
            torch.testing.assert_close([x for _, x in top], [x for _, x in other], rtol=0, atol=2e-3)


def test_several_samples_share_their_prompt(engine: EngineMaker) -> None:
    wanted = [job(key, prompt_of(100), temperature=1.0, sample_index=key, seed=4) for key in range(4)]
    fast = engine()
    answers, expected = run(fast, *wanted), run(engine(engine="torch"), *wanted)
    assert [answers[key].tokens for key in range(4)] == [expected[key].tokens for key in range(4)]
    assert [answers[key].ended.cost.cached_tokens for key in range(4)] == [0, 96, 96, 96]


# ---- ends with steps in flight ----


def test_a_stop_in_the_middle_wastes_no_visible_token(engine: EngineMaker) -> None:
    fast = engine()
    free = solo(fast, job(1, prompt_of(20), max_tokens=24))
    stop = free.tokens[9]
    first = free.tokens.index(stop)
    stopped = run(fast, *(job(k, prompt_of(20), max_tokens=24, stop_token_ids=frozenset({stop})) for k in range(6)))
    for key in range(6):
        assert stopped[key].tokens == free.tokens[:first]
        assert (stopped[key].ended.reason, stopped[key].ended.position) == (EndReason.STOP, first)
    stats = fast.stats()
    assert (stats.running, stats.active_blocks) == (0, 0)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_nothing_is_compiled_while_requests_wait(
    engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    fast = engine("demo", dtype="bfloat16", kv_dtype=kv_dtype, step_tokens=4096)
    compiled: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for width in (1, 5, 20, 40, 64):
        run(fast, *(job(100 * width + key, prompt_of(150 + 9 * key), max_tokens=4 + key) for key in range(width)))
    assert compiled == []


def test_cancelled_streams_return_every_block_and_slot(engine: EngineMaker) -> None:
    fast = engine(kv_blocks=600)
    expected = run(fast, *(job(key, prompt_of(10 + key), max_tokens=20) for key in range(64)))
    run(fast, *(job(key, prompt_of(9 + key), max_tokens=200) for key in range(64)), steps=20)
    for key in range(64):
        fast.cancel(key, 3)
    answers = run(fast, *(job(100 + key, prompt_of(10 + key), max_tokens=20) for key in range(64)))
    assert {answers[key].ended.reason for key in range(64)} == {EndReason.CANCELLED}
    assert [answers[100 + key].tokens for key in range(64)] == [expected[key].tokens for key in range(64)]
    fast.check_integrity()
    assert fast.stats().active_blocks == 0


def test_non_finite_values_fail_one_job_and_reach_no_other(engine: EngineMaker) -> None:
    fast = engine(step_tokens=64)
    decoder_of(fast).model.embedding[300] = torch.nan
    healthy = [job(key, [t for t in prompt_of(30 + key) if t != 300]) for key in range(4)]
    expected = run(fast, *healthy)
    sick = prompt_of(100)
    sick[3] = 300
    answers = run(fast, job(9, sick), *healthy)
    error = answers[9].ended.error
    assert error is not None
    assert (error.reason, answers[9].tokens) == ("NUMERIC", [])
    assert [answers[k].tokens for k in range(4)] == [expected[k].tokens for k in range(4)]
    assert all(bool(torch.isfinite(layer).all()) for layer in decoder_of(fast).kv.layers)


def test_blocks_move_out_and_back(engine: EngineMaker) -> None:
    fast = engine()
    solo(fast, job(1, prompt_of(64), max_tokens=2))
    contents = decoder_of(fast).kv.read([1, 2, 1024])
    decoder_of(fast).kv.scrub([1, 2])
    assert decoder_of(fast).kv.read([1]) == [bytes(decoder_of(fast).kv.block_bytes)]
    decoder_of(fast).kv.write([1, 2], contents[:2])
    assert decoder_of(fast).kv.read([1, 2, 1024]) == contents


# ---- bfloat16 ----


@pytest.mark.parametrize(
    ("family", "gap"),
    # A soft cap brings the logits of Gemma 2 near one another.
    [*((each, 0.5) for each in ("llama", "qwen3", "phi3", "gemma3", "gpt2", "demo")), ("gemma2", 0.1)],
)
def test_bfloat16_agrees_where_the_choice_is_clear(engine: EngineMaker, family: str, gap: float) -> None:
    exact, half = engine(family, engine="torch"), engine(family, dtype="bfloat16")
    worst, clear = 0.0, 0
    for key, prompt in enumerate(PROMPTS[3:]):
        answer = solo(exact, job(key, prompt, max_tokens=24, logprobs=2))
        for position in range(24):  # teacher-forced: each token after the reference's own text
            forced = solo(half, job(key, prompt, emitted=answer.tokens[:position], max_tokens=position + 1, logprobs=2))
            top = answer.tops[position]
            assert top is not None
            own, its = answer.logprobs[position], forced.tops[0]
            assert own is not None
            assert its is not None
            if forced.tokens[0] == answer.tokens[position]:
                worst = max(worst, abs(own - its[0][1]))
            if top[0][1] - top[1][1] > gap:
                clear += 1
                assert forced.tokens[0] == answer.tokens[position]
    print(f"{family}: largest difference of log-probabilities {worst:.4f}, {clear} clear choices")
    assert clear > 20
    assert worst < gap
    assert math.isfinite(worst)


def test_half_precision_graphs_agree_with_eager_steps(engine: EngineMaker) -> None:
    wanted = [job(key, prompt_of(20 + 5 * key), max_tokens=32) for key in range(6)]
    with_graphs = run(engine("demo", dtype="bfloat16"), *wanted)
    without = run(engine("demo", dtype="bfloat16", graphs=False), *wanted)
    same = sum(with_graphs[key].tokens == without[key].tokens for key in range(6))
    assert same >= 5  # padded rows may choose another tile, and so another order of a sum


def test_short_prompts_have_separate_graphs(engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, fast = engine("demo", engine="torch"), engine("demo", dtype="bfloat16", max_batch_size=8, step_tokens=256)
    runner, kinds = fast.runner, []
    assert isinstance(runner, GpuRunner)
    known = {id(graph): kind for kind, graphs in runner.graphs.captured.items() for graph in graphs}
    found = runner.graphs.find

    def noted(tokens: int, rows: int, kind: Kind) -> Graph | None:
        graph = found(tokens, rows, kind)
        kinds.append(known[id(graph)])
        return graph

    monkeypatch.setattr(runner.graphs, "find", noted)
    for length in (2, 40, 64, 103, 128, 150):
        prompt = prompt_of(length)
        top = solo(exact, job(1, prompt, max_tokens=1, logprobs=2)).tops[0]
        assert top is not None
        for cached in (0, (length - 1) // 16 * 16):
            kinds.clear()
            answer = solo(fast, job(1, prompt, max_tokens=1, logprobs=5))
            assert answer.ended.cost.cached_tokens == cached
            assert kinds[0] is (Kind.SHORT_CONTEXT if length <= 128 and is_hopper(runner.device) else Kind.ANY)
            its = dict(answer.tops[0] or ())
            assert abs(its[top[0][0]] - top[0][1]) < 0.2, "the best token has the same probability"


def test_graphs_are_captured_while_another_engine_becomes_garbage(checkpoint: Callable[[str], Path]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    options = EngineOptions(kv_blocks=64, max_batch_size=8, engine="gpu")
    ring: list[object] = [build_engine(checkpoint("llama"), options, lambda phase, done, total: None)]
    ring.append(ring)
    held = [ring]
    del ring
    usual = gc.get_threshold()

    def forget(phase: str, done: int, total: int) -> None:
        if phase == "graphs":
            held.clear()
            gc.set_threshold(*(usual if done == total else (1, 1, 1)))

    engine = build_engine(checkpoint("llama"), options, forget).engine
    assert run(engine, job(1, PROMPTS[3], max_tokens=4))[1].tokens


# ---- keys and values in 8 bits ----


@pytest.mark.parametrize(("kind", "scales"), [("fp8", "checkpoint"), ("fp8", "dynamic"), ("int8", "checkpoint")])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "demo"])
def test_pools_of_8_bits_agree_with_the_cpu(engine: EngineMaker, family: str, kind: str, scales: str) -> None:
    """Teacher-forced, because a value between two representable ones may be rounded differently on the GPU."""
    exact, fast = (engine(family, engine=kind_of, kv_dtype=kind, kv_scales=scales) for kind_of in ("torch", "gpu"))
    own = run(exact, *jobs(bypass_cache=True))
    wanted = [
        job(100 * key + at, prompt, emitted=own[key].tokens[:at], max_tokens=at + 1, logprobs=2)
        for key, prompt in enumerate(PROMPTS)
        for at in range(0, TOKENS, 4)
    ]
    got = run(fast, *wanted)
    same = [got[one.key].tokens[0] == own[one.key // 100].tokens[one.key % 100] for one in wanted]
    assert sum(same) >= 0.93 * len(same)
    assert fast.block_bytes == exact.block_bytes


# ---- deterministic mode ----


@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("demo", "float32", "auto"),
        ("demo", "bfloat16", "auto"),
        ("demo", "bfloat16", "fp8"),
        ("demo", "bfloat16", "int8"),
        ("gpt2", "float32", "auto"),
        ("gpt2-erf-untied", "bfloat16", "auto"),
    ],
)
def test_deterministic_answers_do_not_depend_on_the_batch(
    engine: EngineMaker, family: str, dtype: str, kv_dtype: str
) -> None:
    settings: dict[str, Any] = {"max_tokens": 40, "logprobs": 0, "temperature": 1.0}
    wanted = [job(key, prompt_of(20 + 7 * key), seed=key, bypass_cache=True, **settings) for key in range(8)]
    sure = engine(family, dtype=dtype, deterministic=True, kv_dtype=kv_dtype)
    alone: Answers = {}
    for one in wanted:
        alone |= run(sure, one)
    crowd = [job(100 + key, prompt_of(11 + 3 * key), max_tokens=30) for key in range(40)]
    together = run(sure, *crowd, *wanted)
    tight = engine(
        family, dtype=dtype, deterministic=True, kv_dtype=kv_dtype, max_batch_size=8, step_tokens=13, kv_blocks=30
    )
    chunked = run(tight, *wanted)
    assert tight.stats().preemptions > 0
    eager = run(engine(family, dtype=dtype, deterministic=True, kv_dtype=kv_dtype, graphs=False), *wanted)
    cached = [job(key, prompt_of(20 + 7 * key), seed=key, **settings) for key in range(8)]
    run(sure, *cached)
    hit = run(sure, *cached)
    for key in range(8):
        for other in (together, chunked, eager, hit):
            assert other[key].tokens == alone[key].tokens
            assert other[key].logprobs == alone[key].logprobs
