"""The engine against transformers: same tokens, log-probabilities within 2e-4, alone, batched, chunked, preempted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job
from tests.checkpoints import SHAPES, VOCAB
from tests.oracle import greedy
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, job, prompt_of, run

TOLERANCE = 2e-4
TOKENS = 20
"""Enough that an answer leaves its block of 16, and for prompts of 17 and more the windows of 24 and 40 tokens."""
PROMPTS = [prompt_of(length, vocab=VOCAB) for length in (1, 7, 16, 17, 33, 50, 64, 90)]

Oracle = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=[*SHAPES, "demo"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(shape: str, checkpoint: Callable[[str], Path]) -> Oracle:
    """The greedy tokens of transformers for each prompt, with their log-probabilities."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint(shape), dtype=torch.float32, attn_implementation="eager"
    )
    answers = greedy(model, PROMPTS, TOKENS)
    margins = torch.cat([answer.margins for answer in answers])
    assert float(margins.median()) > 0.1, "the best tokens are too close to compare"
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.fixture(scope="module")
def wide(shape: str, engine: EngineMaker) -> GenerationEngine:
    """An engine with slots and blocks for all jobs."""
    return engine(shape, kv_blocks=1024)


def jobs(*, first_key: int = 0, max_tokens: int = TOKENS, **settings: Any) -> list[Job]:
    """A greedy job for each prompt."""
    return [job(first_key + i, p, max_tokens=max_tokens, logprobs=0, **settings) for i, p in enumerate(PROMPTS)]


def assert_equal(answers: dict[int, Answer], oracle: Oracle, first_key: int = 0) -> None:
    for index, (tokens, logprobs) in enumerate(oracle):
        answer = answers[first_key + index]
        assert answer.tokens == tokens, f"prompt {index}"
        assert answer.positions == list(range(TOKENS))
        difference = max(
            abs(mine - its) for mine, its in zip(answer.logprobs, logprobs, strict=True) if mine is not None
        )
        assert difference <= TOLERANCE, f"prompt {index}: {difference}"


def test_answers_of_single_jobs(wide: GenerationEngine, oracle: Oracle) -> None:
    answers: dict[int, Answer] = {}
    for one in jobs(bypass_cache=True):
        answers |= run(wide, one)
    assert_equal(answers, oracle)


def test_answers_in_a_batch_of_64_mixed_lengths(wide: GenerationEngine, oracle: Oracle) -> None:
    crowd = [
        job(100 + i, prompt_of(3 + 2 * i, seed=1), max_tokens=12 + i // 3, temperature=i % 2, seed=i)
        for i in range(64 - len(PROMPTS))
    ]
    for one in [*crowd, *jobs(bypass_cache=True)]:
        wide.submit(one)
    most_running = 0
    answers: dict[int, Answer] = {}
    while wide.has_work():
        output = wide.step()
        most_running = max(most_running, wide.stats().running)
        for token in output.tokens:
            answers.setdefault(token.key, Answer()).add(token)
    assert most_running == 64
    assert_equal(answers, oracle)


def test_answers_with_chunked_prefill(shape: str, engine: EngineMaker, oracle: Oracle) -> None:
    answers = run(engine(shape, max_batch_size=8, step_tokens=11), *jobs(bypass_cache=True))
    assert_equal(answers, oracle)
    assert max(answers[i].ended.cost.prefill_steps for i in answers) >= 5


def test_answers_after_a_prefix_hit(wide: GenerationEngine, oracle: Oracle) -> None:
    run(wide, *jobs(max_tokens=1))
    answers = run(wide, *jobs(first_key=50))
    assert_equal(answers, oracle, first_key=50)
    for index, prompt in enumerate(PROMPTS):
        cost = answers[50 + index].ended.cost
        assert cost.cached_tokens == (len(prompt) - 1) // 16 * 16
        assert cost.cached_tokens + cost.prefill_tokens == len(prompt)


def test_answers_after_preemptions(shape: str, engine: EngineMaker, oracle: Oracle) -> None:
    small = engine(shape, kv_blocks=30, block_size=8, max_batch_size=8)
    answers = run(small, *jobs(bypass_cache=True))
    assert_equal(answers, oracle)
    preemptions = [answers[i].ended.cost.preemptions for i in range(len(PROMPTS))]
    assert sum(preemptions) == small.stats().preemptions >= 3
    assert max(preemptions) <= 3
