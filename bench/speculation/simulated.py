"""Speculation simulated: the engine's own choice of depth and the gateway's own pace, on a clock that is only counted.

    python -m bench.speculation.simulated [--rows 1 4 16 64] [--acceptance 0.7 0.5 0.9] [--seeds 4] [--seconds 3]
        [--late-ms 0.3]

No GPU is needed. Steps take what a trace of one H200 shows (`STEPS`), and all else takes no time. It shows what a
change of the choice or of the pace does before it is measured, over many seeds: tokens/s and the time between messages
at p99, over those without guesses, and the share of steps that have guesses. `--late-ms`: waits of the gateway's event
loop end late by up to this.
"""

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from bench.speculation.cells import CONTEXT, MOST_TOKENS, Cell, p99
from services.gateway.links.token_pace import TokenPace
from services.worker.build import paced as paced_build
from services.worker.build.choose import build_engine
from services.worker.build.drafting.speculate import make_speculation
from services.worker.engine import generation
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.options import EngineOptions
from services.worker.runners.base import StepResult
from services.worker.runners.cuda.graphs import most_guesses
from services.worker.runners.paced import PacedRunner, PacedStep, PacedTiming
from services.worker.runners.step import MOST_GUESSES, Edit, Words, unpack
from weft.launch.demo_model import model_folder

SETTLE_S, HOLD_S = 2.5, 0.05


@dataclass(frozen=True, slots=True)
class Steps:
    """How long a step of some number of answers takes. Measured on one H200 at 8292d568: 8B in bf16, parallel draft of
    the 1B shape in int4."""

    guesses_ms: tuple[float, ...]
    """By the number of guesses of a row, from none."""
    growth: float
    """By what part they take longer each second, as answers become longer."""
    plain_p99_ms: float
    """The time between messages without guesses, through a mesh, at 76a2f1e0."""


STEPS = {
    1: Steps((3.95, 4.7, 5.1, 5.0, 5.05, 5.2, 5.2, 5.3, 6.2), 0.007, 4.51),
    4: Steps((4.15, 5.0, 5.4, 5.3, 5.5, 6.2, 5.9, 5.9, 7.3), 0.007, 4.87),
    16: Steps((4.4, 5.4, 6.5, 7.0, 7.0, 8.0, 7.7, 7.7, 9.7), 0.022, 5.48),
    64: Steps((5.9, 8.2, 10.5, 15.0, 18.0), 0.045, 8.10),
}
CATCH_UP_S, CATCH_UP_TOKEN_S = 0.011, 3e-6
"""A step in which the draft computes tokens that it has missed takes so much longer, and for each token so much."""
STEADY_TOKENS = MOST_GUESSES + 2
"""Tokens that the draft computes of an answer before each guess, at most."""
PROMPT_TOKEN_S = 18e-6
FIRST_S = 0.001
"""The first step with so many guesses takes so much longer: the draft has fewer guesses ready."""


class Clock:
    """Stands in for the module `time` of the engine."""

    now = 100.0

    def monotonic(self) -> float:
        """Seconds that were counted."""
        return self.now


class SimulatedRunner(PacedRunner):
    """A paced runner of a device: up to two steps are launched, and one begins when the one before has ended."""

    depth = 2

    def __init__(
        self,
        vocab_size: int,
        end_tokens: tuple[int, ...],
        slots: int,
        timing: PacedTiming,
        acceptance: float,
        clock: Clock,
    ) -> None:
        """As in PacedRunner."""
        super().__init__(vocab_size, end_tokens, slots, timing, acceptance)
        self._clock, self._busy_until = clock, 0.0
        self.begin()

    def begin(self) -> None:
        """New answers begin."""
        self._began, self._seen = self._clock.now, set[int]()
        self.guessed = self.launched = 0
        """Steps with guesses, and all."""

    def launch(self, words: Words) -> PacedStep:
        """Draw the step's tokens; its time begins when the device is free."""
        step = super().launch(words)
        step.ends = self._busy_until = max(self._clock.now, self._busy_until) + self._seconds(words)
        return step

    def _seconds(self, words: Words) -> float:
        edits, rows = unpack(words)
        depth = max((samples - 1 for samples in rows.samples), default=0)
        drafted = [len(data.tolist()) - 1 for edit, _, data in edits if edit is Edit.DRAFT]
        behind = sum(tokens for tokens in drafted if tokens > STEADY_TOKENS)
        prompt = len(rows.ids.tolist()) - sum(rows.samples)
        self.launched, self.guessed = self.launched + 1, self.guessed + (depth > 0)
        steps = STEPS[min(STEPS, key=lambda count: abs(count - len(rows.slots)))]
        slower = 1 + 0.01 * random.gauss(0, 1) + (0.15 if random.random() < 0.03 else 0)
        seconds = steps.guesses_ms[depth] * 1e-3 * (1 + steps.growth * (self._clock.now - self._began)) * slower
        if depth and depth not in self._seen:
            self._seen.add(depth)
            seconds += FIRST_S
        if behind:
            seconds += CATCH_UP_S + behind * CATCH_UP_TOKEN_S
        return seconds + (prompt * PROMPT_TOKEN_S if prompt > len(rows.slots) else 0)

    def done(self, step: PacedStep) -> bool:
        """Whether the step's time is over."""
        return self._clock.now >= step.ends

    def collect(self, step: PacedStep) -> StepResult:
        """Count the time on until the step ends."""
        self._clock.now = max(self._clock.now, step.ends) + 5e-5
        return step.result


@contextmanager
def simulated_engine(acceptance: float, folder: Path) -> Iterator[tuple[GenerationEngine, SimulatedRunner, Clock]]:
    """An engine on a counted clock. Its speculation is that of a GPU with a parallel draft."""
    clock = Clock()
    options = EngineOptions(
        engine="paced", paced_step_ms=0, paced_acceptance=acceptance, speculate="draft:any", kv_blocks=20_000,
        max_batch_size=max(STEPS), max_seq_length=CONTEXT + MOST_TOKENS, step_tokens=8192,
    )  # fmt: skip
    runner = partial(SimulatedRunner, clock=clock)
    with patch.object(generation, "time", clock), patch.object(paced_build, "PacedRunner", runner):
        engine = build_engine(folder, options, lambda *_: None).engine
        assert isinstance(engine, GenerationEngine)
        assert isinstance(engine.runner, SimulatedRunner)
        limit = partial(most_guesses, guesses=MOST_GUESSES)
        engine.speculation = make_speculation(options, CONTEXT + MOST_TOKENS, True, limit, redo_guesses=True)
        yield engine, engine.runner, clock


def measure(
    engine: GenerationEngine, runner: SimulatedRunner, clock: Clock, count: int, seconds: float, late_s: float
) -> Cell:
    """Figures of `count` answers, once the depth has settled."""
    runner.begin()
    keys = [random.getrandbits(62) for _ in range(count)]
    for key in keys:
        params = SamplingParams(seed=key, max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True)
        engine.submit(Job(key, random.choices(range(100, 2000), k=CONTEXT), CONTEXT, params, bypass_cache=True))
    arrivals: dict[int, list[float]] = {key: [] for key in keys}
    begun = clock.now
    _step_until(engine, clock, begun + SETTLE_S, arrivals)
    begin, before, guessed, launched = clock.now, sum(map(len, arrivals.values())), runner.guessed, runner.launched
    _step_until(engine, clock, begin + seconds, arrivals)
    took, tokens = clock.now - begin, sum(map(len, arrivals.values())) - before
    for key in keys:
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    steps = STEPS[count]
    plain_s = steps.guesses_ms[0] * 1e-3 * (1 + steps.growth * (SETTLE_S + seconds / 2))
    gaps = [gap for times in arrivals.values() for at, gap in received(times, late_s) if at > begin]
    return {
        "ratio": tokens / took * plain_s / count,
        "p99 ratio": p99(gaps) * 1e3 / steps.plain_p99_ms,
        "guessed": (runner.guessed - guessed) / (runner.launched - launched),
    }


def _step_until(engine: GenerationEngine, clock: Clock, end: float, arrivals: dict[int, list[float]]) -> None:
    while clock.now < end:
        for token in engine.step().tokens:
            arrivals[token.key].append(clock.now)
        clock.now += 2e-5


def received(times: list[float], late_s: float) -> list[tuple[float, float]]:
    """When each message of an answer but the first comes to its client, and how long after the one before; `times`:
    when the worker has drawn its tokens."""
    pace, messages, wake = TokenPace(HOLD_S), list[float](), -math.inf

    def release(now: float) -> float:
        """-> when the wait for the next ones is over."""
        _, wait_s = pace.release(now)
        messages.append(now + abs(random.gauss(0, 2e-4)))
        return now + wait_s + 5e-5 + late_s * random.random() if wait_s else -math.inf

    for time, count in Counter(times).items():
        now = time + abs(random.gauss(0, 1.5e-4))
        while pace.held and wake < now:
            wake = release(wake)
        for _ in range(count):
            pace.arrived(now)
        if wake < now:
            wake = release(now)
    return [(after, after - before) for before, after in pairwise(messages)]


def cells(asked: argparse.Namespace, acceptance: float, folder: Path) -> dict[int, list[Cell]]:
    """The figures of each number of answers, one for each seed."""
    found: dict[int, list[Cell]] = {count: [] for count in asked.rows}
    for seed in range(asked.seeds):
        random.seed(seed)
        with simulated_engine(acceptance, folder) as (engine, runner, clock):
            for count in asked.rows:
                found[count].append(measure(engine, runner, clock, count, asked.seconds, asked.late_ms * 1e-3))
    return found


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], choices=list(STEPS))
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.5, 0.9])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--late-ms", type=float, default=0.3)
    asked = parser.parse_args()
    folder = Path(model_folder())
    print("| acceptance, answers | tokens/s | worst | p99 | worst | steps with guesses |\n|---|---|---|---|---|---|")
    for acceptance in asked.acceptance:
        for count, each in cells(asked, acceptance, folder).items():
            ratios, tails = [cell["ratio"] for cell in each], [cell["p99 ratio"] for cell in each]
            figures = statistics.mean(ratios), min(ratios), statistics.mean(tails), max(tails)
            guessed = statistics.mean(cell["guessed"] for cell in each)
            row = " | ".join(f"{figure:.2f}" for figure in figures)
            print(f"| {acceptance}, {count} | {row} | {guessed:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
