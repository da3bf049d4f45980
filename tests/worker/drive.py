"""Drives an engine by hand, step by step, checking its books after each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Ended, Job, SamplingParams, TokenOut
from tests.checkpoints import VOCAB


@dataclass
class Answer:
    """All that an engine said of one job."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)
    end: Ended | None = None

    @property
    def ended(self) -> Ended:
        """Its end, which has come."""
        assert self.end is not None, "the job has not ended"
        return self.end

    def add(self, out: TokenOut) -> None:
        """One more token."""
        assert self.end is None, "a token after the end"
        self.tokens.append(out.token_id)
        self.positions.append(out.position)
        self.logprobs.append(out.logprob)
        self.tops.append(out.top)


def job(key: int, prompt: Sequence[int], *, emitted: Sequence[int] = (), max_tokens: int = 16, **settings: Any) -> Job:
    """A greedy job, unless the settings say otherwise; settings go to the job or to its sampling parameters."""
    of_job = {name: settings.pop(name) for name in list(settings) if name in Job.__dataclass_fields__}
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **settings})
    return Job(key, [*prompt, *emitted], len(prompt), params, **of_job)


def run(engine: GenerationEngine, *jobs: Job, steps: int | None = None) -> dict[int, Answer]:
    """Submit the jobs, run until all is done (or so many steps), and collect what was said by key."""
    for one in jobs:
        engine.submit(one)
    answers: dict[int, Answer] = {one.key: Answer() for one in jobs}
    while engine.has_work() and steps != 0:
        output = engine.step()
        engine.check_integrity()
        for token in output.tokens:
            answers.setdefault(token.key, Answer()).add(token)
        for end in output.ended:
            answers.setdefault(end.key, Answer()).end = end
        steps = None if steps is None else steps - 1
    return answers


def solo(engine: GenerationEngine, one: Job) -> Answer:
    """The answer to one job that is alone."""
    return run(engine, one)[one.key]


def prompt_of(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random token ids without the special ones."""
    source = random.Random(f"{length}/{seed}")
    return [source.randrange(2, vocab) for _ in range(length)]
