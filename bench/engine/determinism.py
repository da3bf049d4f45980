"""Deterministic mode on one GPU, 8B shape with random weights: equality of results with and without it, and its cost.

    python -m bench.engine.determinism [--model llama-3.1-8b] [--tokens 200] [--out bench/results]

Sixteen prompts, half greedy and half sampled, are answered alone, in a batch of 64, in small chunks with preemptions,
and after a prefix hit. Tokens and log-probabilities must be equal bit for bit with the mode on, and must differ with it
off; otherwise the exit code is 1.
"""

import argparse
import gc
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.engine.limits import LEAST, limits_of
from bench.engine.loop import Loop, decode, prefill
from report import machine
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.runners.cuda.runner import GpuRunner

PROMPTS, CROWD = 16, 64
BATCHES = (1, 8, 32, 64)
PREFILLS = (1950,)

Answer = list[tuple[int, float | None]]


def jobs(count: int, tokens: int, first_key: int, **settings: Any) -> list[Job]:
    """Jobs with prompts of 20 to 900 tokens, a function of their index; every other one is sampled."""
    made = []
    for place in range(count):
        source = random.Random(place)
        prompt = [source.randrange(100, 6000) for _ in range(source.randrange(20, 900))]
        params = SamplingParams(
            max_tokens=tokens, temperature=float(place % 2), top_p=0.95 if place % 4 == 3 else 1.0, seed=place,
            logprobs=0, ignore_eos=True,
        )  # fmt: skip
        made.append(Job(first_key + place, prompt, len(prompt), params, **settings))
    return made


def answers(engine: GenerationEngine, wanted: Sequence[Job]) -> list[Answer]:
    """Run the jobs to the end -> tokens and log-probabilities of each."""
    said: dict[int, Answer] = {one.key: [] for one in wanted}
    for one in wanted:
        engine.submit(one)
    while engine.has_work():
        for token in engine.step().tokens:
            said[token.key].append((token.token_id, token.logprob))
    return list(said.values())


def open_engine(model: str, deterministic: bool, **options: Any) -> GenerationEngine:
    """An engine of random weights, the same for every call."""
    settings: dict[str, Any] = {
        "engine": "gpu", "dtype": "bfloat16", "deterministic": deterministic, "max_batch_size": CROWD,
        "step_tokens": 2048, "chunk_tokens": 160, "max_seq_length": 4096, "kv_blocks": 12000, **options,
    }  # fmt: skip
    return build_engine(presets.folder_of(model), EngineOptions(**settings), lambda *_: None).engine


def close(engine: GenerationEngine) -> None:
    """Free the engine's memory."""
    assert isinstance(engine.runner, GpuRunner)
    engine.runner.kv.layers.clear()
    gc.collect()
    torch.cuda.empty_cache()


def scenes(
    model: str, deterministic: bool, tokens: int, engine: GenerationEngine
) -> Iterator[tuple[str, list[Answer]]]:
    """The answers to the sixteen prompts in each situation."""
    alone = jobs(PROMPTS, tokens, 0, bypass_cache=True)
    yield "alone", [answers(engine, [one])[0] for one in alone]
    crowd = jobs(CROWD, tokens, 100, bypass_cache=True)
    yield f"in a batch of {CROWD}", answers(engine, crowd)[:PROMPTS]
    answers(engine, jobs(PROMPTS, 2, 200))
    yield "after a prefix hit", answers(engine, jobs(PROMPTS, tokens, 300))
    small = open_engine(model, deterministic, step_tokens=96, chunk_tokens=None, kv_blocks=420, max_batch_size=PROMPTS)
    yield "in small chunks, with pauses", answers(small, jobs(PROMPTS, tokens, 400, bypass_cache=True))
    print(f"  {small.stats().preemptions} pauses", flush=True)
    close(small)


def price(engine: GenerationEngine) -> dict[str, float]:
    """Milliseconds of a step of answers, tokens per second of a prompt."""
    loop = Loop(engine, limits_of(engine, LEAST, fp8=False))
    cells = {f"decode {batch}, ms": decode(loop, batch)["step ms"] for batch in BATCHES}
    return cells | {f"prefill {count}, tok/s": prefill(loop, count)["tok/s"] for count in PREFILLS}


def measure(model: str, deterministic: bool, tokens: int) -> dict[str, Any]:
    """Number of equal answers in each situation, and the cost of the mode."""
    engine = open_engine(model, deterministic)
    found: dict[str, Any] = {}
    first: list[Answer] = []
    for name, said in scenes(model, deterministic, tokens, engine):
        first = first or said
        assert all(len(answer) == tokens for answer in said)
        same = sum(a == b for a, b in zip(first, said, strict=True))
        words = sum([t for t, _ in a] == [t for t, _ in b] for a, b in zip(first, said, strict=True))
        found[name] = {"same": same, "same tokens": words}
        print(f"deterministic {deterministic}, {name}: {same} of {PROMPTS} same, {words} in their tokens", flush=True)
    found["price"] = price(engine)
    print(found["price"], flush=True)
    close(engine)
    return found


def page(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    on, off = found["on"], found["off"]
    lines = ["# Deterministic mode", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    lines += [f"- model: {found['model']}, random weights, bf16; {PROMPTS} prompts x {found['tokens']} tokens", ""]
    lines += ["| answers equal to those alone, bit for bit | on | off |", "|---|---|---|"]
    for name in on:
        if name not in ("price", "alone"):
            lines.append(f"| {name} | {on[name]['same']} of {PROMPTS} | {off[name]['same']} of {PROMPTS} |")
    lines += ["", "| price | on | off | on / off |", "|---|---|---|---|"]
    for name, value in on["price"].items():
        other = off["price"][name]
        lines.append(f"| {name} | {value:,.5g} | {other:,.5g} | {value / other:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write JSON and a table; exit with 1 if the mode does not hold or makes no difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    wanted = parser.parse_args()
    machine.need_gpu()
    found: dict[str, Any] = {"machine": machine.describe(), "model": wanted.model, "tokens": wanted.tokens}
    for name, deterministic in (("on", True), ("off", False)):
        found[name] = measure(wanted.model, deterministic, wanted.tokens)
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / "determinism.json").write_text(json.dumps(found, indent=1) + "\n")
    (wanted.out / "determinism.md").write_text(page(found))
    companies = [name for name in found["on"] if name != "price"]
    holds = all(found["on"][name]["same"] == PROMPTS for name in companies)
    fails = any(found["off"][name]["same"] < PROMPTS for name in companies)
    print(f"with the mode on: {'holds' if holds else 'BROKEN'}; off: {'fails, as it must' if fails else 'HOLDS'}")
    sys.exit(not (holds and fails))


if __name__ == "__main__":
    main()
