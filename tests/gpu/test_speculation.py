"""Guessed tokens change no answer on a GPU: with graphs, two steps in flight, pauses, penalties and a draft model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import speculation_equality as equality
from services.worker.engine.generation import GenerationEngine
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.speculative.speculation import Speculation
from tests.gpu.conftest import EngineMaker
from tests.worker.drive import job, open_engine, prompt_of, run
from tests.worker.test_speculation import PARAMS, Replay

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS = 40


def guessing(engine: GenerationEngine, proposer: Any, depth: int = 4) -> GenerationEngine:
    engine.speculation = Speculation(proposer, depth, overlaps=True)
    return engine


@pytest.mark.parametrize("shape", ["llama", "mistral-window", "qwen3", "gpt2"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_are_those_of_plain_decoding(shape: str, deterministic: bool, engine: EngineMaker) -> None:
    """In float32 the best token and the noise decide by more than the last bits: equal without the mode, too."""
    jobs = [
        job(key, prompt_of(5 + 13 * (key % 4), key), max_tokens=TOKENS, sample_index=key % 3, **params)
        for key, params in enumerate([*PARAMS.values()] * 2)
    ]
    plain = run(engine(shape, deterministic=deterministic), *jobs)
    made = guessing(engine(shape, deterministic=deterministic, speculate="ngram"), Replay(plain))
    answers = run(made, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens, key
        if deterministic:
            assert (answer.logprobs, answer.tops) == (plain[key].logprobs, plain[key].tops)
    assert 0 < made.stats().guesses.accepted < made.stats().guesses.drafted


@pytest.mark.parametrize("depth", range(1, 9))
def test_every_depth_and_number_of_rows_has_the_same_answers(depth: int, engine: EngineMaker) -> None:
    made = engine("llama", deterministic=True, speculate="ngram")
    for rows in (1, 2, 3, 7, 16, 33):
        jobs = [job(key, prompt_of(9 + key, key), max_tokens=20, temperature=key % 2, seed=key) for key in range(rows)]
        made.speculation = None
        plain = run(made, *jobs)
        answers = run(guessing(made, Replay(plain), depth), *jobs)
        assert [answers[key].tokens for key in range(rows)] == [plain[key].tokens for key in range(rows)]


@pytest.mark.parametrize("speculate", ["ngram", "suffix", "draft"])
def test_random_requests_are_equal(speculate: str, checkpoint: Callable[[str], Path]) -> None:
    name = f"draft:{checkpoint('qwen3')}" if speculate == "draft" else speculate
    for depth in (4, None):
        wrong, line = equality.compare(
            checkpoint("llama"), 120, engine="gpu", dtype="float32", speculate=name, speculate_depth=depth
        )
        assert wrong == 0, line


def test_a_draft_that_is_the_model_itself_is_always_right(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    options: dict[str, Any] = {"engine": "gpu", "dtype": "float32", "kv_blocks": 256, "deterministic": True}
    jobs = [job(key, prompt_of(30, key), max_tokens=TOKENS, temperature=0.8 * (key % 2), seed=key) for key in range(9)]
    plain = run(open_engine(folder, **options), *jobs)
    engine = open_engine(folder, **options, speculate=f"draft:{folder}", speculate_depth=4)
    answers = run(engine, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens
        assert answer.ended.cost.accepted_tokens == answer.ended.cost.drafted_tokens > 0


def test_forced_acceptance_keeps_the_forced_share(engine: EngineMaker) -> None:
    made = engine("llama", speculate="ngram")
    assert isinstance(made.runner, GpuRunner)
    made.runner.force_acceptance(0.7)
    jobs = [job(key, prompt_of(9, key), max_tokens=120) for key in range(16)]
    run(guessing(made, Replay(run(made, *jobs))), *jobs)
    guesses = made.stats().guesses
    assert guesses.accepted_at[0] / guesses.drafted_at[0] == pytest.approx(0.7, abs=0.08)
