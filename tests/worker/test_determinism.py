"""In deterministic mode a job's tokens and log-probabilities do not depend on other jobs or recovery in any bit."""

from collections.abc import Callable, Iterator

import pytest
import torch

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, job, prompt_of, run, solo

SHAPES = ("llama", "mistral-window", "qwen2-window", "qwen3", "gemma3", "mixtral", "gpt2", "gpt2-erf-untied", "demo")
TOKENS = 20
"""More than a block, so that each answer begins one."""
LENGTHS = (1, 18, 47, 96, 150)

Bits = list[tuple[list[int], list[float | None]]]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def jobs(first_key: int = 0, emitted: Bits | None = None, kept: int = 0, max_tokens: int = TOKENS) -> list[Job]:
    """Sampled jobs; with `emitted`, as the next attempt after `kept` tokens has them."""
    return [
        job(
            first_key + i,
            prompt_of(length),
            emitted=emitted[i][0][:kept] if emitted else (),
            max_tokens=max_tokens,
            temperature=0.9,
            seed=i,
            logprobs=0,
        )
        for i, length in enumerate(LENGTHS)
    ]


def crowd(size: int) -> list[Job]:
    return [
        job(1000 + i, prompt_of(2 + 3 * i, seed=7), max_tokens=10 + i % 11, temperature=0.7, seed=i)
        for i in range(size)
    ]


def bits(answers: dict[int, Answer], first_key: int = 0) -> Bits:
    return [(answers[first_key + i].tokens, answers[first_key + i].logprobs) for i in range(len(LENGTHS))]


def alone(engine: GenerationEngine) -> Bits:
    return bits({one.key: solo(engine, one) for one in jobs()})


def in_a_crowd(make: Callable[..., GenerationEngine]) -> Bits:
    engine = make(kv_blocks=1024)
    answers = run(engine, *crowd(64 - len(LENGTHS)), *jobs())
    return bits(answers)


def in_odd_chunks(make: Callable[..., GenerationEngine]) -> Bits:
    answers = run(make(max_batch_size=5, step_tokens=13), *jobs())
    assert max(answer.ended.cost.prefill_steps for answer in answers.values()) > 10
    return bits(answers)


def after_a_prefix_hit(make: Callable[..., GenerationEngine]) -> Bits:
    engine = make()
    run(engine, *jobs(max_tokens=1))
    answers = run(engine, *jobs(first_key=50))
    assert answers[50 + 4].ended.cost.cached_tokens == 144
    return bits(answers, first_key=50)


def after_preemptions(make: Callable[..., GenerationEngine]) -> Bits:
    engine = make(kv_blocks=24, max_batch_size=8)
    answers = run(engine, *jobs())
    assert engine.stats().preemptions > 0
    return bits(answers)


def after_a_move(make: Callable[..., GenerationEngine]) -> Bits:
    """Another engine continues from prompt and emitted tokens, beside other jobs."""
    before = bits(run(make(), *jobs()))
    kept = 7
    moved = run(make(step_tokens=100), *crowd(9), *jobs(emitted=before, kept=kept))
    for i in range(len(LENGTHS)):
        assert moved[i].positions == list(range(kept, TOKENS))
    return [(b[0][:kept] + m[0], b[1][:kept] + m[1]) for b, m in zip(before, bits(moved), strict=True)]


SCENES = [in_a_crowd, in_odd_chunks, after_a_prefix_hit, after_preemptions, after_a_move]


@pytest.mark.parametrize("shape", SHAPES)
def test_other_jobs_and_recovery_change_no_bit(shape: str, engine: EngineMaker) -> None:
    def make(**options: object) -> GenerationEngine:
        return engine(shape, deterministic=True, **options)

    expected = alone(make(prefix_cache=False))
    for scene in SCENES:
        assert scene(make) == expected, scene.__name__


def test_two_threads_always_give_the_same_bits(engine: EngineMaker, two_threads: None) -> None:
    """Two threads share the demo model's sums over 896 numbers."""
    made = engine("demo", deterministic=True, threads=2, max_batch_size=8, step_tokens=31)
    one = job(1, prompt_of(47), max_tokens=6, logprobs=0, bypass_cache=True)
    alone, beside_others = solo(made, one), run(made, *crowd(5), one, steps=40)[1]
    assert len(alone.tokens) == 6
    assert (beside_others.tokens, beside_others.logprobs) == (alone.tokens, alone.logprobs)


def test_deterministic_engines_use_one_thread_by_default(engine: EngineMaker, two_threads: None) -> None:
    engine("llama", deterministic=True)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("scene", [in_a_crowd, after_a_move])
def test_without_the_mode_the_same_check_fails(engine: EngineMaker, scene: Callable[..., Bits]) -> None:
    def make(**options: object) -> GenerationEngine:
        return engine("demo", deterministic=False, **options)

    assert scene(make) != alone(make(prefix_cache=False))
