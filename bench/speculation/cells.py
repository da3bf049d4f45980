"""Measures a bare engine with answers that go on for ever: tokens/s and the time between tokens. Knows no settings."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams

CONTEXT, MOST_TOKENS = 512, 15000
"""Tokens of a prompt, and of an answer: none ends while it is measured."""
TIMED_S, SETTLE_S = 2.0, 1.5
WINDOW = 64
PACES = ("ms output p50", "ms output p99", "ms token p99", f"ms {WINDOW} tokens p99")
"""The time from one output of an answer to the next, as a client sees it: the tokens of a step come together. The same
time shared by the output's tokens, for each token. And of this many tokens one after another, for each of them."""

Cell = dict[str, float]


def measure(engine: GenerationEngine, concurrency: int, prompts: Sequence[Sequence[int]] | None = None) -> Cell:
    """Figures of this many answers, once the depth has settled. prompts: None: random ones."""
    keys = begin(engine, prompts or random_prompts(concurrency, CONTEXT))
    run_for(engine, SETTLE_S)
    before = engine.stats()
    seconds, arrivals = run_for(engine, TIMED_S)
    after = engine.stats()
    rows, drafted = after.guesses.rows - before.guesses.rows, after.guesses.drafted - before.guesses.drafted
    cell = {
        "tok/s": sum(map(len, arrivals.values())) / seconds,
        "k": drafted / max(rows, 1),
        "rows guessed": rows / (max(after.steps - before.steps, 1) * concurrency),
        "right": (after.guesses.accepted - before.guesses.accepted) / max(drafted, 1),
        **paces(arrivals.values()),
    }
    for key in keys:
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    return cell


def random_prompts(count: int, tokens: int) -> list[list[int]]:
    """Prompts without a pattern, a function of their number."""
    return [random.Random(key).choices(range(100, 6000), k=tokens) for key in range(count)]


def begin(engine: GenerationEngine, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Submit jobs with long answers and compute their prompts. -> the keys of the jobs."""
    for key, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True)
        engine.submit(Job(key, list(prompt), len(prompt), params, bypass_cache=True))
    count = len(prompts)
    while engine.stats().running < count or engine.stats().prefill_backlog > count:
        engine.step()
    return list(range(count))


def run_for(engine: GenerationEngine, seconds: float) -> tuple[float, Mapping[int, list[float]]]:
    """Step for this many seconds. -> seconds, and for each job when each of its tokens came."""
    arrivals: dict[int, list[float]] = {}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        output = engine.step()
        now = time.perf_counter()
        for token in output.tokens:
            arrivals.setdefault(token.key, []).append(now)
    return time.perf_counter() - began, arrivals


def paces(arrivals: Iterable[Sequence[float]]) -> Cell:
    """`PACES` of answers, from the times at which the tokens of each came; 0 where there are too few."""
    outputs, shared, windows = list[float](), list[float](), list[float]()
    for times in arrivals:
        counts = Counter(times)
        for before, now in pairwise(counts):
            outputs.append(now - before)
            shared += [(now - before) / counts[now]] * counts[now]
        windows += [(after - before) / WINDOW for before, after in zip(times, times[WINDOW:], strict=False)]
    values = statistics.median(outputs or [0.0]), p99(outputs), p99(shared), p99(windows)
    return {name: value * 1e3 for name, value in zip(PACES, values, strict=True)}


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; 0 of no values."""
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0
