"""The ways in which a grid must answer as one process does: chunked, cached, preempted, several samples, scores."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job
from tests.parallel.threads import grid_engine
from tests.worker.drive import Answer, job, open_engine, prompt_of, run

TOKENS = 12
TOLERANCE = 1e-4
LENGTHS = (1, 31, 47, 70)
Answers = dict[int, Answer]


def jobs(*, bypass_cache: bool = True) -> list[Job]:
    """Greedy jobs; two more that draw two samples of one prompt, with penalties."""
    settings: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": 2, "bypass_cache": bypass_cache, "ignore_eos": True}
    made = [job(i, prompt_of(length), **settings) for i, length in enumerate(LENGTHS)]
    drawn = {**settings, "temperature": 0.9, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5}
    made += [job(10 + i, prompt_of(20), sample_index=i, **drawn) for i in range(2)]
    scored = prompt_of(40, seed=3)
    return [*made, job(20, scored, **settings, prompt_logprobs=1)]


def greedy() -> list[Job]:
    """Those that draw nothing. Where ranks round what one process does not, another first token may be drawn."""
    return [one for one in jobs() if not one.params.temperature]


def one_process(folder: Path, **options: object) -> Answers:
    """The answers of one process."""
    engine = open_engine(folder, kv_blocks=128, max_batch_size=16, threads=1, **options)
    return run(engine, *jobs())


def chunked(engine: GenerationEngine) -> Answers:
    """Prompts are computed in several steps."""
    answers = run(engine, *jobs())
    assert max(answer.ended.cost.prefill_steps for answer in answers.values()) > 1
    return answers


def cached(engine: GenerationEngine) -> Answers:
    """Prompts are found in the prefix cache."""
    run(engine, *jobs(bypass_cache=False))
    answers = run(engine, *jobs(bypass_cache=False))
    assert answers[3].ended.cost.cached_tokens == 64
    return answers


def preempted(engine: GenerationEngine) -> Answers:
    """There is room for few sequences only."""
    answers = run(engine, *jobs())
    assert engine.stats().preemptions > 0
    return answers


Scene = Callable[[GenerationEngine], Answers]
SCENES: dict[Scene, dict[str, int]] = {
    chunked: {"step_tokens": 19, "max_batch_size": 16},
    cached: {},
    preempted: {"kv_blocks": 6, "max_batch_size": 16},
}
"""Each with the options of its engine."""


def differences(expected: Answers, found: Answers, tolerance: float = TOLERANCE, *, tokens: bool = True) -> list[str]:
    """One sentence for each answer that differs; without `tokens` only first log-probabilities are compared."""
    wrong = []
    for key, one in expected.items():
        other = found[key]
        both = list(zip(one.logprobs, other.logprobs, strict=False))[: None if tokens else 1]
        gap = max((abs((mine or 0) - (its or 0)) for mine, its in both), default=0.0)
        if (tokens and one.tokens != other.tokens) or other.end is None or other.end.error is not None:
            wrong.append(f"job {key}: {one.tokens} and {other.tokens}, {other.end}")
        elif gap > tolerance:
            wrong.append(f"job {key}: log-probabilities differ by {gap}")
    return wrong


def compare(
    folder: Path, tensor: int, pipeline: int, expected: Answers, scenes: Iterable[Scene] = SCENES, **options: Any
) -> list[str]:
    """Scenes on one grid with these options -> one sentence for each answer that differs from that of one process."""
    wrong = []
    for scene in scenes:
        with grid_engine(folder, tensor, pipeline, **SCENES[scene], **options) as engine:
            found = differences(expected, scene(engine))
            wrong += [f"{tensor} x {pipeline}, {scene.__name__}: {each}" for each in found]
    return wrong
