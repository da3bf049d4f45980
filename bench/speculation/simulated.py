"""Speculation simulated: the engine's own choice of depth and the gateway's own pace, on a clock that is only counted.

    python -m bench.speculation.simulated [--rows 1 4 16 64] [--acceptance 0.7 0.5 0.9] [--tokens 200] [--seeds 4]
        [--seconds 3] [--late-ms 0.3]

No GPU is needed. Steps take what a trace of one H200 shows (`STEPS`), and all else takes no time. It shows what a
change of the choice or of the pace does before it is measured, over many seeds: tokens/s and the time between messages
at p99, over those without guesses, and the share of steps that have guesses. `--late-ms`: waits of a gateway end late
by up to this. Without `--tokens` no answer ends, and the time at p99 is compared with that of a mesh on an H200. With
it an answer has 0.5 to 1.5 times as many tokens and is replaced when it ends, and what it is compared with is
simulated, too.
"""

import argparse
import math
import random
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from bench.speculation.cells import CONTEXT, MOST_TOKENS, Cell, p99
from services.gateway.links.token_pace import StepMeans, TokenPace
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
CATCH_UP_S, CATCH_UP_TOKEN_S = 0.8e-3, 3.2e-6
"""A step in which the draft computes tokens that it has missed takes so much longer, and for each token so much (ledger
0395)."""
STEADY_TOKENS = MOST_GUESSES + 2
"""Tokens that the draft computes of an answer before each guess, at most."""
PROMPT_TOKEN_S = 18e-6
NEXT_S = 0.004
"""From the end of an answer to the job of its client's next one."""
FIRST_S = 0.002
"""A step with more guesses than the one before takes so much longer: the draft has fewer guesses ready."""
HOST_ROW_S = 8e-6
"""Of each answer: the host's part of a step that is planned when the values of the one before are known."""


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

    def begin(self, grows: bool = True) -> None:
        """New answers begin, and become longer if `grows`."""
        self._began, self._grows, self._depth = self._clock.now, grows, 0
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
        grown = 1 + steps.growth * (self._clock.now - self._began) * self._grows
        seconds = steps.guesses_ms[depth] * 1e-3 * grown * slower
        seconds += FIRST_S if depth > self._depth else 0.0
        seconds -= HOST_ROW_S * len(rows.slots) if depth else 0.0
        self._depth = depth
        if behind:
            seconds += CATCH_UP_S + behind * CATCH_UP_TOKEN_S
        return seconds + (prompt * PROMPT_TOKEN_S if prompt > len(rows.slots) else 0)

    def done(self, step: PacedStep) -> bool:
        """Whether the step's time is over."""
        return self._clock.now >= step.ends

    def collect(self, step: PacedStep) -> StepResult:
        """Count the time on until the step ends."""
        self._clock.now = max(self._clock.now, step.ends) + 5e-5 + HOST_ROW_S * len(step.result.finite)
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


class Answers:
    """Answers that are computed at a time, and when each of their tokens is drawn."""

    def __init__(self, engine: GenerationEngine, clock: Clock, count: int, tokens: int | None) -> None:
        """tokens: of an answer, about, which is replaced when it ends; None: none ends."""
        self._engine, self._clock, self._tokens = engine, clock, tokens
        self.arrivals: dict[int, list[float]] = {}
        self._due: deque[float] = deque()
        """When those that replace answers begin."""
        for _ in range(count):
            self._begin_one()

    def _begin_one(self) -> None:
        key = random.getrandbits(62)
        longest = MOST_TOKENS if self._tokens is None else self._tokens // 2 + random.randrange(self._tokens)
        params = SamplingParams(seed=key, max_tokens=longest, temperature=0.0, ignore_eos=True)
        prompt = random.choices(range(100, 2000), k=CONTEXT)
        self._engine.submit(Job(key, prompt, CONTEXT, params, bypass_cache=True))
        self.arrivals[key] = []

    def step_until(self, end: float) -> None:
        """Steps until the clock shows this."""
        while self._clock.now < end:
            while self._due and (self._due[0] <= self._clock.now or not self._engine.has_work()):
                self._clock.now = max(self._clock.now, self._due.popleft())
                self._begin_one()
            output = self._engine.step()
            for token in output.tokens:
                self.arrivals[token.key].append(self._clock.now)
            self._due.extend(self._clock.now + NEXT_S for _ in output.ended)
            self._clock.now += 2e-5

    def drawn(self) -> int:
        """Tokens so far."""
        return sum(map(len, self.arrivals.values()))

    def end(self) -> None:
        """Cancels all."""
        for key in self.arrivals:
            self._engine.cancel(key)
        while self._engine.has_work():
            self._engine.step()

    def gaps(self, begin: float, hold_s: float, late_s: float) -> list[float]:
        """The times between two messages of an answer, from `begin` on."""
        found, ended = list[float](), dict[float, StepMeans]()
        for times in sorted(filter(None, self.arrivals.values())):
            pace = TokenPace(hold_s, ended.get(max((end for end in ended if end < times[0]), default=0.0)))
            found += [gap for at, gap in received(times, late_s, pace) if at > begin]
            if pace.means.guessed:
                ended[times[-1]] = pace.means
        return found


def measure(
    engine: GenerationEngine,
    runner: SimulatedRunner,
    clock: Clock,
    count: int,
    seconds: float,
    late_s: float,
    tokens: int | None = None,
) -> Cell:
    """Figures of `count` answers, once the depth has settled. tokens: as in `Answers`."""
    timed = partial(_timed, engine, runner, clock, count, seconds, late_s, tokens)
    rate, gap, guessed = timed(HOLD_S)
    steps, speculation = STEPS[count], engine.speculation
    if tokens is None:
        plain_s = steps.guesses_ms[0] * 1e-3 * (1 + steps.growth * (SETTLE_S + seconds / 2))
        plain_rate, plain_gap = count / plain_s, steps.plain_p99_ms * 1e-3
    else:
        engine.speculation = None
        plain_rate, plain_gap, _ = timed(0.0)
        engine.speculation = speculation
    return {"ratio": rate / plain_rate, "p99 ratio": gap / plain_gap, "guessed": guessed}


def _timed(
    engine: GenerationEngine, runner: SimulatedRunner, clock: Clock, count: int, seconds: float, late_s: float,
    tokens: int | None, hold_s: float,
) -> tuple[float, float, float]:  # fmt: skip
    """-> tokens/s, the time between messages at p99 in seconds, and the share of steps with guesses."""
    runner.begin(grows=tokens is None)
    answers = Answers(engine, clock, count, tokens)
    answers.step_until(clock.now + SETTLE_S)
    begin, before, guessed, launched = clock.now, answers.drawn(), runner.guessed, runner.launched
    answers.step_until(begin + seconds)
    rate = (answers.drawn() - before) / (clock.now - begin)
    share = (runner.guessed - guessed) / (runner.launched - launched)
    answers.end()
    return rate, p99(answers.gaps(begin, hold_s, late_s)), share


def received(times: list[float], late_s: float, pace: TokenPace) -> list[tuple[float, float]]:
    """When each message of an answer but the first comes to its client, and how long after the one before; `times`:
    when the worker has drawn its tokens."""
    messages, wake = list[float](), -math.inf

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
                late_s, tokens = asked.late_ms * 1e-3, asked.tokens
                found[count].append(measure(engine, runner, clock, count, asked.seconds, late_s, tokens))
    return found


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], choices=list(STEPS))
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.5, 0.9])
    parser.add_argument("--tokens", type=int, help="of an answer, about; without it no answer ends")
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
