"""Measurements of the bare engine: decode in batches, prefill alone, both together, requests in a closed loop.

No network and no clients. Each measurement returns one cell: figures by name.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.engine.limits import Limits
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.runners.cuda.gpu_step import GpuStep
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.step_words import Kind
from weft.load.distribution import Distribution

CONTEXT, STEPS = 2100, 96
"""Approximate context length of decode, and the number of timed steps."""
SPAN, SETTLED = 600, 16
"""Tokens of the answers in the mixed measurement, and tokens of each answer before the measurement begins."""
SECONDS = 40.0
"""Finished requests of a closed loop are not replaced after this time."""

Cell = dict[str, float]


class Driver:
    """An engine that is driven by hand."""

    def __init__(self, engine: GenerationEngine, vocab_size: int) -> None:
        self.engine, self._vocab_size = engine, vocab_size
        self._keys = iter(range(1 << 30))

    def submit(self, prompt: int, answer: int, prefix: Sequence[int] = ()) -> int:
        """Submit a job whose prompt is `prefix` followed by random tokens -> its key."""
        key = next(self._keys)
        tokens = [*prefix, *random.choices(range(100, self._vocab_size - 300), k=prompt - len(prefix))]
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        self.engine.submit(Job(key, tokens, prompt, params))
        return key

    def drain(self) -> None:
        """Step until all jobs have ended."""
        while self.engine.has_work():
            self.engine.step()

    def fill(self, batch: int, context: int) -> None:
        """Step until `batch` answers of about `context` tokens are computed beside one another."""
        for _ in range(batch):
            self.submit(context - STEPS // 2 - 16, STEPS + 512)
        while (stats := self.engine.stats()).running < batch or stats.prefill_backlog > batch:
            self.engine.step()
        for _ in range(16):
            self.engine.step()

    def cancel_all(self) -> None:
        """Cancel the answers that are computed."""
        for sequence in list(self.engine.planner.running):
            self.engine.cancel(sequence.job.key)
        self.drain()


class Loop(Driver):
    """An engine on one GPU, and its recorded steps."""

    def __init__(self, engine: GenerationEngine, limits: Limits) -> None:
        super().__init__(engine, limits.config.vocab_size)
        self.limits = limits
        assert isinstance(engine.runner, GpuRunner)
        self.runner: GpuRunner = engine.runner
        self.runner.measure_gaps = True
        self.steps: list[GpuStep] = []
        collect = self.runner.collect

        def noted(step: GpuStep) -> Any:
            self.steps.append(step)
            return collect(step)

        self.runner.collect = noted  # type: ignore[method-assign]

    def gaps_us(self) -> list[float]:
        """Microseconds that the device was idle before each recorded step but the first."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [self.runner.gap_s(before, after) * 1e6 for before, after in pairs]


def decode(loop: Loop, batch: int, context: int = CONTEXT) -> Cell:
    """Decode steps of `batch` sequences with about `context` tokens each."""
    loop.fill(batch, context)
    loop.steps.clear()
    ends = [time.perf_counter()]
    for _ in range(STEPS):
        loop.engine.step()
        ends.append(time.perf_counter())
    seconds = (ends[-1] - ends[0]) / STEPS
    gaps = loop.gaps_us()
    seen = statistics.mean(s.total for s in loop.engine.planner.running) - STEPS / 2
    alone = _replays(loop, batch)
    loop.cancel_all()
    floor = loop.limits.decode_s(batch, seen)
    return {
        "step ms": seconds * 1e3,
        "tok/s": batch / seconds,
        "graph ms": alone * 1e3,
        "idle us p50": statistics.median(gaps),
        "idle us p99": sorted(gaps)[int(len(gaps) * 0.99)],
        "floor ms": floor * 1e3,
        "share": floor / seconds,
        "context": seen,
    }


def _replays(loop: Loop, batch: int) -> float:
    """Seconds of a CUDA graph replay without work on the host between replays."""
    found = loop.runner.graphs.find(batch, batch, Kind.ANSWERS)
    assert found is not None
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(20):
        found.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 20e3


def first_token_times(loop: Driver, tokens: int, rest_s: float = 0.1, prompts: int = 12) -> list[float]:
    """Seconds to the first tokens of the later half of some prompts, each alone. Its answer is decoded for `rest_s`
    before the next prompt arrives: the GPU lowers its clocks after some tenths of a second at full power, and also when
    it is idle."""
    times = []
    for _ in range(prompts):
        began = time.perf_counter()
        key = loop.submit(tokens, 512)
        while not loop.engine.step().tokens:
            pass
        times.append(time.perf_counter() - began)
        while time.perf_counter() - began < times[-1] + rest_s:
            loop.engine.step()
        loop.engine.cancel(key)
        loop.drain()
    return times[prompts // 2 :]


def prefill(loop: Loop, tokens: int, rest_s: float = 0.1, prompts: int = 12) -> Cell:
    """The time to the first token of a prompt alone, as `first_token_times`."""
    times = first_token_times(loop, tokens, rest_s, prompts)
    seconds = statistics.median(times)
    floor = loop.limits.prefill_s(tokens)
    return {
        "ttft ms": seconds * 1e3,
        "ttft ms max": max(times) * 1e3,
        "tok/s": tokens / seconds,
        "floor ms": floor * 1e3,
        "share": floor / seconds,
    }


def prefill_on_and_on(loop: Loop, tokens: int) -> Cell:
    """Prompts back to back for more than a second, also against the rate that the GPU sustains for a second."""
    cell = prefill(loop, tokens, rest_s=0.0, prompts=36)
    limits = loop.limits
    floor = replace(limits, matmul=limits.sustained, linear=limits.sustained).prefill_s(tokens)
    return {**cell, "sustained floor ms": floor * 1e3, "sustained share": floor * 1e3 / cell["ttft ms"]}


def mixed(loop: Loop, streams: int, prompt: int, seconds: float) -> Cell:
    """Time between tokens of running answers, alone and while long prompts are computed one after another.

    Contexts are the same in both, SPAN tokens around CONTEXT: after these, a new round of answers begins with prompts
    that are in the prefix cache. The time between rounds is not counted.
    """
    texts = [random.choices(range(100, 30_000), k=CONTEXT - SPAN // 2) for _ in range(streams)]
    quiet = _round(loop, texts, 0).gaps
    busy, computed, passed = list[float](), 0, 0.0
    while passed < seconds:
        done = _round(loop, texts, prompt)
        busy, computed, passed = busy + done.gaps, computed + done.computed, passed + done.seconds
    return {
        "quiet itl ms p50": _percentile(quiet, 50),
        "quiet itl ms p99": _percentile(quiet, 99),
        "busy itl ms p50": _percentile(busy, 50),
        "busy itl ms p99": _percentile(busy, 99),
        "ratio p99": _percentile(busy, 99) / _percentile(quiet, 99),
        "prefill tok/s": computed / passed,
        "busy s": passed,
    }


@dataclass
class _Round:
    """Measurements of one round of answers."""

    gaps: list[float]
    """Milliseconds between an answer's tokens."""
    computed: int = 0
    """Prompt tokens computed in the meantime."""
    seconds: float = 0.0


def _round(loop: Loop, texts: Sequence[Sequence[int]], prompt: int) -> _Round:
    """Decode SPAN tokens for each text; unless `prompt` is 0, a prompt of that many tokens is always being computed."""
    keys = {loop.submit(len(text) + 1, SPAN, text) for text in texts}
    tokens_of, last = dict.fromkeys(keys, 0), dict[int, float]()
    done, beside = 0, loop.submit(prompt, 1) if prompt else -1
    seen, began, before, over = _Round([]), 0.0, 0, False
    while not over:
        output = loop.engine.step()
        now = time.perf_counter()
        for ended in output.ended:
            over |= ended.key in keys
            if ended.key == beside:
                done, beside = done + 1, loop.submit(prompt, 1)
        for token in output.tokens:
            if token.key in keys:
                tokens_of[token.key] += 1
                if began:
                    seen.gaps.append((now - last[token.key]) * 1e3)
                last[token.key] = now
        under_way = sum(s.computed for s in loop.engine.planner.running if s.job.key == beside)
        seen.computed, seen.seconds = done * prompt + under_way - before, now - began
        if not began and min(tokens_of.values()) >= SETTLED:
            began, before = now, done * prompt + under_way
    for sequence in [*loop.engine.planner.running, *loop.engine.planner.waiting]:
        loop.engine.cancel(sequence.job.key)
    loop.drain()
    return seen


def closed(loop: Driver, prompt: int, answer: int, width: int, shared: int = 0) -> Cell:
    """`width` requests at a time, each finished one replaced until 3 * width (at least 16) are sent or SECONDS have
    passed: the load of `bench.mesh.gpu` without a mesh. A step's tokens are counted when the step has ended."""
    prefix = random.choices(range(100, 30_000), k=shared)
    left, began = max(3 * width, 16), time.perf_counter()
    sent: dict[int, float] = {}
    last: dict[int, float] = {}
    first, gaps, tokens, now = Distribution(), Distribution(), 0, began
    for _ in range(width):
        sent[loop.submit(prompt, answer, prefix)] = began
    left -= width
    while loop.engine.has_work():
        output = loop.engine.step()
        now = time.perf_counter()
        for token in output.tokens:
            before = last.get(token.key)
            (first if before is None else gaps).add((now - (sent[token.key] if before is None else before)) * 1e3)
            last[token.key] = now
        tokens += len(output.tokens)
        for _ in output.ended:
            if left and now - began < SECONDS:
                left -= 1
                sent[loop.submit(prompt, answer, prefix)] = now
    return {
        "tok/s": tokens / (now - began),
        "ttft p50": first.percentile(50),
        "ttft p99": first.percentile(99),
        "itl p50": gaps.percentile(50),
        "itl p99": gaps.percentile(99),
        "requests": float(len(sent)),
    }


def _percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]
