"""Opens engines and drives them by hand, step by step, checking their integrity after each."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.worker.build.choose import BuiltEngine, build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Ended, Job, SamplingParams, StepOutput, TokenOut
from services.worker.models.decoder import Decoder
from services.worker.options import EngineOptions
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.inspection import DecoderRunner
from tests.checkpoints import VOCAB


def built(
    folder: Path, *, fingerprint: bytes = b"", graphs: bool = True, warm_up: bool = False, **options: Any
) -> BuiltEngine:
    """An engine for the checkpoint in this folder, and the shape of its model. warm_up: for a test that needs known
    times of steps; on a GPU it always warms up."""
    settings = EngineOptions(**options)
    made = build_engine(folder, settings, lambda *_: None, graphs=graphs, warm_up=warm_up or settings.on_gpu)
    made.engine.use_fingerprint(fingerprint)
    return made


def open_engine(folder: Path, **options: Any) -> GenerationEngine:
    """An engine for the checkpoint in this folder."""
    return built(folder, **options).engine


def decoder_of(engine: GenerationEngine) -> DecoderRunner:
    """The engine's runner, opened up to its model and its pools."""
    if isinstance(engine.runner, CpuRunner):
        return engine.runner
    from services.worker.runners.cuda.runner import GpuRunner

    assert isinstance(engine.runner, GpuRunner)
    return engine.runner


def fail_last_layer(model: Decoder) -> None:
    """Make the next step fail before its last layer, after what is called between layers."""
    between, last = model.between_layers, len(model.layers) - 1
    assert between is not None

    def fail(layer: int) -> None:
        between(layer)
        if layer == last:
            model.between_layers = between
            raise RuntimeError("a fault")

    model.between_layers = fail


class Recorded:
    """`EngineEvents` that keep what an engine reports while it runs."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.predictions: list[float] = []
        self.ended = threading.Event()
        """Set when a job has ended."""

    def launched(self, predicted_s: float) -> None:
        self.predictions.append(predicted_s)

    def begun(self, output: StepOutput) -> None:
        self.stepped(output)

    def stepped(self, output: StepOutput) -> None:
        self.outputs.append(output)
        if output.ended:
            self.ended.set()

    def wait_for_ends(self, count: int, seconds: float = 60.0) -> bool:
        """Whether this many jobs end in time."""
        until = time.monotonic() + seconds
        while sum(len(output.ended) for output in self.outputs) < count and time.monotonic() < until:
            time.sleep(0.001)
        return sum(len(output.ended) for output in self.outputs) >= count


@dataclass
class Answer:
    """The tokens and the end that an engine reported for one job."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)
    end: Ended | None = None

    @property
    def ended(self) -> Ended:
        """The end of the job. Asserts that the job has ended."""
        assert self.end is not None, "the job has not ended"
        return self.end

    def add(self, out: TokenOut) -> None:
        """Adds a token."""
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
    """Submits the jobs, runs until all have ended (or for `steps` steps), and returns the answers by key."""
    for one in jobs:
        engine.submit(one)
    answers: dict[int, Answer] = {one.key: Answer() for one in jobs}
    while engine.has_work() and steps != 0:
        if not engine.planner.running:
            time.sleep(0.0005)  # All jobs may wait for threads, from which steps would take the processor.
        output = engine.step()
        engine.check_integrity()
        for token in output.tokens:
            answers.setdefault(token.key, Answer()).add(token)
        for end in output.ended:
            answers.setdefault(end.key, Answer()).end = end
        steps = None if steps is None else steps - 1
    return answers


def solo(engine: GenerationEngine, one: Job) -> Answer:
    """The answer to one job without others beside it."""
    return run(engine, one)[one.key]


def prompt_of(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random token ids without the special ones."""
    source = random.Random(f"{length}/{seed}")
    return [source.randrange(2, vocab) for _ in range(length)]
