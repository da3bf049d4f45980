"""Log-probabilities of prompts are those of the model at every position: in chunks, beside other rows, after hits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import EngineMaker
from tests.worker.drive import job, prompt_of, run, solo
from tests.worker.test_overlap import LateRunner

Scores = tuple[list[float], list[list[tuple[int, float]]]]


def scores_of(engine: GenerationEngine, *jobs: Job) -> tuple[dict[int, Scores], dict[int, list[int]]]:
    """Log-probabilities of the prompts by job, each position once and before the first token; and the answers."""
    found: dict[int, Scores] = {}
    answers: dict[int, list[int]] = {}
    for one in jobs:
        engine.submit(one)
    while engine.has_work():
        output = engine.step()
        engine.check_integrity()
        for part in output.scores:
            logprobs, tops = found.setdefault(part.key, ([], []))
            assert part.position == len(logprobs) + 1
            assert part.key not in answers
            logprobs += part.logprobs
            tops += part.tops
        for token in output.tokens:
            answers.setdefault(token.key, []).append(token.token_id)
        assert not [ended for ended in output.ended if ended.error]
    return found, answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("oracle") / "llama")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_right(model: Any, prompt: list[int], scores: Scores, most: int) -> None:
    """Compares with transformers at every position."""
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    logprobs, tops = scores
    wanted = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=0, atol=2e-3)
    assert [len(top) for top in tops] == [most] * (len(prompt) - 1)
    for top, line in zip(tops, expected, strict=True):
        best = torch.topk(line, max(most, 1)).values[:most]
        torch.testing.assert_close(torch.tensor([value for _, value in top]), best, rtol=0, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"step_tokens": 64, "max_batch_size": 8}, {"kv_blocks": 24}])
def test_they_are_those_of_transformers(engine: EngineMaker, model: Any, options: dict[str, Any]) -> None:
    """In one step, in chunks, and with so few blocks that jobs are paused."""
    prompts = {key: prompt_of(length) for key, length in enumerate((2, 9, 70, 150))}
    asking = [job(key, prompt, max_tokens=8, prompt_logprobs=key) for key, prompt in prompts.items()]
    others = [job(10 + key, prompt_of(40, seed=key), max_tokens=12, logprobs=1) for key in range(3)]
    opened = engine(**options)
    expected = {one.key: solo(engine(), one).tokens for one in others}
    found, answers = scores_of(opened, *asking, *others)
    assert found.keys() == prompts.keys()
    for key, prompt in prompts.items():
        assert_right(model, prompt, found[key], key)
        assert answers[key] == solo(engine(), job(99, prompt, max_tokens=8)).tokens
    assert {key: answers[key] for key in expected} == expected


def test_a_cached_prefix_hides_no_position(engine: EngineMaker, model: Any) -> None:
    opened, prompt = engine(), prompt_of(100)
    first = solo(opened, job(1, prompt, max_tokens=4))
    assert solo(opened, job(2, prompt, max_tokens=4)).ended.cost.cached_tokens > 0
    found, answers = scores_of(opened, job(3, prompt, max_tokens=4, prompt_logprobs=2))
    assert_right(model, prompt, found[3], 2)
    assert answers[3] == first.tokens
    assert solo(opened, job(4, prompt, max_tokens=4)).ended.cost.cached_tokens > 0, "its blocks serve others"


def test_a_next_attempt_reports_the_prompt_alone(engine: EngineMaker, model: Any) -> None:
    opened, prompt = engine(), prompt_of(50)
    whole = solo(opened, job(1, prompt, max_tokens=12)).tokens
    found, answers = scores_of(opened, job(2, prompt, emitted=whole[:5], max_tokens=12, prompt_logprobs=1))
    assert_right(model, prompt, found[2], 1)
    assert answers[2] == whole[5:]


def test_a_prompt_of_one_token_has_none(engine: EngineMaker) -> None:
    found, answers = scores_of(engine(), job(1, prompt_of(1), max_tokens=3, prompt_logprobs=1))
    assert not found
    assert len(answers[1]) == 3


def test_two_steps_in_flight_report_the_same(engine: EngineMaker, model: Any) -> None:
    opened: Any = engine(step_tokens=64, max_batch_size=8)
    opened.runner = LateRunner(opened.runner)
    prompt = prompt_of(150)
    found, _ = scores_of(opened, job(1, prompt, max_tokens=8, prompt_logprobs=3), job(2, prompt_of(30), max_tokens=30))
    assert_right(model, prompt, found[1], 3)
    assert run(opened, job(3, prompt, max_tokens=2))[3].ended.cost.cached_tokens > 0
