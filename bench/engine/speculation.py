"""Speculation on one GPU: 8B shape with a 1B-shape draft at forced acceptance, and n-grams on copying answers.

    python -m bench.engine.speculation [--model llama-3.1-8b] [--draft llama-3.2-1b] [--draft-quantize int4]
                                       [--requests 200] [--seconds 420] [--out bench/results]

First, in deterministic mode, answers with guesses must be those without (greedy and sampled, penalties, stops,
log-probabilities); otherwise the exit code is 1. Then tokens/s and the time between tokens for each concurrency,
without guesses and with a draft of chosen depth, whose guesses count as right with a set chance whatever is drawn. A
cell that no longer fits into the time is left out, and named.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import figures
from bench.engine import speculation_equality as equality
from report import machine
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.speculative.speculation import Speculation

CONCURRENCIES = (1, 4, 8, 16, 64, 256)
ACCEPTANCES = (0.5, 0.7, 0.9)
CONTEXT, TIMED_S, SETTLE_S = 512, 2.0, 1.5
LEAST_RATIO = 0.97
COLUMNS = ("tok/s", "ms between p50", "ms between p99", "k", "rows guessed", "right", "ratio")

Cell = dict[str, float]


def open_engine(model: str, **options: Any) -> GenerationEngine:
    """An engine of random weights, the same for every call."""
    settings: dict[str, Any] = {
        "engine": "gpu", "dtype": "bfloat16", "max_batch_size": 256, "max_seq_length": 8192, "kv_blocks": 36000,
        **options,
    }  # fmt: skip
    return build_engine(presets.folder_of(model), EngineOptions(**settings), lambda *_: None).engine


def close(engine: GenerationEngine) -> None:
    """Free the engine's memory."""
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    runner.kv.layers.clear()
    gc.collect()
    torch.cuda.empty_cache()


def equal(model: str, draft: str, requests: int) -> list[str]:
    """Compare answers in deterministic mode. -> what differs."""
    options: dict[str, Any] = {"deterministic": True, "max_batch_size": 16, "step_tokens": 512, "kv_blocks": 2000}
    engine = open_engine(model, **options)
    assert isinstance(engine.runner, GpuRunner)
    jobs = equality.requests(requests, engine.runner.model.config.vocab_size, (), 400)
    plain = equality.answers(engine, jobs)
    close(engine)
    del engine
    wrong = []
    for speculate in ("ngram", f"draft:{presets.PREFIX}{draft}"):
        guessing = open_engine(model, **{**options, "kv_blocks": 300}, speculate=speculate, speculate_depth=4)
        found = equality.answers(guessing, equality.moved(jobs, plain))
        differing = equality.differing(plain, found, exact=True)
        counts = guessing.stats().guesses
        same, pauses = requests - len(differing), guessing.stats().preemptions
        print(f"{speculate}: {same} of {requests} equal, {counts.accepted} of {counts.drafted} right, {pauses} pauses")
        wrong += [f"{speculate}: request {key}" for key in differing]
        close(guessing)
        del guessing
    return wrong


def begin(engine: GenerationEngine, concurrency: int, prompts: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Submit `concurrency` jobs with long answers and compute their prompts. -> the keys of the jobs."""
    keys = list(range(concurrency))
    for key in keys:
        source = random.Random(key)
        prompt = list(prompts[key]) if prompts else source.choices(range(100, 6000), k=CONTEXT)
        params = SamplingParams(max_tokens=7000, temperature=0.0, ignore_eos=True)
        engine.submit(Job(key, prompt, len(prompt), params, bypass_cache=True))
    while engine.stats().running < concurrency or engine.stats().prefill_backlog > concurrency:
        engine.step()
    return keys


def run_for(engine: GenerationEngine, seconds: float) -> tuple[float, list[float], int]:
    """Step for this many seconds. -> seconds, times between a job's outputs (a row's tokens come together), tokens."""
    last: dict[int, float] = {}
    between: list[float] = []
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        output = engine.step()
        now = time.perf_counter()
        tokens += len(output.tokens)
        for key in {token.key for token in output.tokens}:
            if key in last:
                between.append(now - last[key])
            last[key] = now
    return time.perf_counter() - began, between, tokens


def measure(engine: GenerationEngine, concurrency: int, prompts: Sequence[Sequence[int]] | None = None) -> Cell:
    """Tokens per second and the time between outputs, once the depth has settled."""
    keys = begin(engine, concurrency, prompts)
    run_for(engine, SETTLE_S)
    before = engine.stats()
    seconds, between, tokens = run_for(engine, TIMED_S)
    after = engine.stats()
    rows, drafted = after.guesses.rows - before.guesses.rows, after.guesses.drafted - before.guesses.drafted
    steps = max(after.steps - before.steps, 1)
    cell = {
        "tok/s": tokens / seconds,
        "ms between p50": statistics.median(between) * 1e3,
        "ms between p99": sorted(between)[int(len(between) * 0.99)] * 1e3,
        "k": drafted / max(rows, 1),
        "rows guessed": rows / (steps * concurrency),
        "right": (after.guesses.accepted - before.guesses.accepted) / max(drafted, 1),
    }
    for key in keys:
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    return cell


def reset(engine: GenerationEngine, acceptance: float | None, depth: int | None) -> None:
    """Forget what was measured, and force this acceptance. The graphs are captured anew."""
    runner, old = engine.runner, engine.speculation
    assert isinstance(runner, GpuRunner)
    assert isinstance(old, Speculation)
    engine.speculation = old.fresh(depth)
    if runner.forward.forced_acceptance != acceptance:
        runner.force_acceptance(acceptance)


def copying(count: int) -> list[list[int]]:
    """Prompts that repeat themselves, as edits of a text do. A greedy answer of random weights soon repeats itself."""
    made = []
    for key in range(count):
        source = random.Random(key)
        text = source.choices(range(100, 6000), k=160)
        made.append((text * 4)[:CONTEXT])
    return made


def cells(model: str, draft: str, quantize: str | None) -> Iterator[tuple[str, Cell]]:
    """Name and figures of each cell."""
    engine = open_engine(model)
    for concurrency in CONCURRENCIES:
        yield f"off {concurrency}", measure(engine, concurrency)
    close(engine)
    del engine
    engine = open_engine(model, speculate=f"draft:{presets.PREFIX}{draft}", draft_quantize=quantize)
    for acceptance in (0.7, 0.5, 0.9):
        for concurrency in CONCURRENCIES:
            reset(engine, acceptance, None)
            yield f"draft {acceptance} {concurrency}", measure(engine, concurrency)
        if acceptance == 0.7:
            for concurrency in (1, 8):
                reset(engine, acceptance, 4)
                yield f"draft {acceptance}, k = 4 {concurrency}", measure(engine, concurrency)
    close(engine)
    del engine
    for speculate in ("ngram", "suffix"):
        engine = open_engine(model, speculate=speculate)
        for concurrency in (1, 8, 64):
            reset(engine, None, None)
            yield f"{speculate} copying {concurrency}", measure(engine, concurrency, copying(concurrency))
        close(engine)
        del engine


def save(out: Path, result: Mapping[str, Any]) -> None:
    """Write the cells as JSON and as a table, and the speed-up over the number of requests."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "speculation.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = ["# Speculation: the bare engine on one GPU", ""]
    lines += [f"- {name}: {value}" for group in ("machine", "settings") for name, value in result[group].items()]
    lines += ["- k: guesses of a row on average; right: share of the guesses", ""]
    lines += ["| " + " | ".join(["", *COLUMNS]) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    points: dict[str, list[tuple[float, float]]] = {}
    for name, cell in result["cells"].items():
        lines.append(
            f"| {name} | " + " | ".join(_number(cell[column]) if column in cell else "" for column in COLUMNS) + " |"
        )
        kind, _, concurrency = name.rpartition(" ")
        if kind.startswith("draft") and "k =" not in kind:
            points.setdefault(kind.replace("draft", "acceptance"), []).append((float(concurrency), cell["ratio"]))
    (out / "speculation.md").write_text("\n".join(lines) + "\n")
    title = f"Speed-up by a draft model, {result['settings']['model']}"
    figures.write(out / "speculation.svg", title, points, "tokens/s over those without guesses")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--draft", default="llama-3.2-1b")
    parser.add_argument("--draft-quantize", default=None)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=420.0, help="time for the measurements")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    asked = parser.parse_args()
    machine.need_gpu()
    ends = time.perf_counter() + asked.seconds
    wrong = equal(asked.model, asked.draft, asked.requests) if asked.requests else []
    if wrong:
        print(*wrong, sep="\n")
        return 1
    found: dict[str, Cell] = {}
    for name, cell in cells(asked.model, asked.draft, asked.draft_quantize):
        off = found.get(f"off {name.rpartition(' ')[2]}")
        if off is not None:
            cell["ratio"] = cell["tok/s"] / off["tok/s"]
        found[name] = cell
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in cell.items()), flush=True)
        if time.perf_counter() > ends:
            print("the time is over: later cells are left out", flush=True)
            break
    settings = {name: str(value) for name, value in vars(asked).items() if name != "out"}
    save(asked.out, {"machine": machine.describe(), "settings": settings, "cells": found})
    return int(any(cell.get("ratio", 1.0) < LEAST_RATIO for cell in found.values()))


if __name__ == "__main__":
    sys.exit(main())
