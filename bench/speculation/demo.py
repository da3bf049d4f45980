"""Speculation of the demo model: tokens/s without guesses and with each proposer, on a CPU or a GPU.

    python -m bench.speculation.demo [--engine torch] [--model models/weft-story-11m] [--heads FOLDER]
        [--draft models/weft-story-2m ...] [--depth 0 2 4] [--temperature 0 0.8] [--seconds 4] [--out FOLDER]

Answers go on from held-out text, greedy and sampled, 1, 4 and 16 at a time. A depth of 0 is chosen by what is measured,
as in service. On a CPU seconds are those of the processor, with one thread: other programs on the machine change them
little. On a GPU (`--engine gpu`) they are those of the clock, and numbers are in bfloat16. The table goes to
speculation-demo.md in the folder, if there is one.
"""

import argparse
import gzip
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from report import machine
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.options import EngineOptions
from services.worker.speculative.speculation import Speculation

HELD_OUT = Path("compress/excerpts/heldout.txt.gz")
CONCURRENCIES = (1, 4, 16)
SETTLE_STEPS = 60
PROMPT_TOKENS, MOST_TOKENS = 24, 400


def prompts(model: Path) -> list[list[int]]:
    """Beginnings of held-out text, as many as the most answers at a time."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(gzip.decompress(HELD_OUT.read_bytes()).decode()).ids
    apart = len(ids) // max(CONCURRENCIES)
    return [ids[at * apart : at * apart + PROMPT_TOKENS] for at in range(max(CONCURRENCIES))]


def begin(engine: GenerationEngine, begun: Sequence[list[int]], temperature: float, number: int) -> None:
    """Submit a round of answers, one for each prompt, and compute the prompts."""
    for key, prompt in enumerate(begun):
        seed = number * len(begun) + key
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        engine.submit(Job(key, prompt, len(prompt), params, bypass_cache=True))
    while engine.stats().running < len(begun) or engine.stats().prefill_backlog > len(begun):
        engine.step()


def end(engine: GenerationEngine, answers: int) -> None:
    """Cancel the answers of a round."""
    for key in range(answers):
        engine.cancel(key)
    while engine.has_work():
        engine.step()


def measure(
    engine: GenerationEngine, begun: Sequence[list[int]], temperature: float, seconds: float, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """-> tokens per second, the tokens that a row of guesses draws and the guesses that it has, on average. A round of
    answers is timed until one of them ends: later steps would have fewer rows."""
    begin(engine, begun, temperature, 0)
    for _ in range(SETTLE_STEPS):
        if engine.step().ended:
            break
    end(engine, len(begun))
    before, tokens, took, number = engine.stats().guesses, 0, 0.0, 0
    while took < seconds:
        number += 1
        begin(engine, begun, temperature, number)
        began, over = clock(), False
        while not over and took + clock() - began < seconds:
            output = engine.step()
            tokens, over = tokens + len(output.tokens), bool(output.ended)
        took += clock() - began
        end(engine, len(begun))
    counts = engine.stats().guesses
    rows = max(counts.rows - before.rows, 1)
    return tokens / took, 1 + (counts.accepted - before.accepted) / rows, (counts.drafted - before.drafted) / rows


def options_of(engine: str, speculate: str, depth: int) -> EngineOptions:
    """Of an engine that guesses in this way; a depth of 0 is chosen."""
    settings: dict[str, Any] = {"engine": engine, "speculate": speculate, "speculate_depth": depth or None}
    device: dict[str, Any] = {"dtype": "bfloat16", "kv_blocks": 4096} if engine == "gpu" else {"threads": 1}
    return EngineOptions(**settings, **device, max_batch_size=max(CONCURRENCIES), max_seq_length=512)


def reset(engine: GenerationEngine, depth: int) -> None:
    """Forget what was measured."""
    if isinstance(engine.speculation, Speculation):
        engine.speculation = engine.speculation.fresh(depth or None)


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("torch", "gpu"), default="torch")
    parser.add_argument("--model", type=Path, default=Path("models/weft-story-11m"))
    parser.add_argument("--draft", nargs="+", default=["models/weft-story-2m"])
    parser.add_argument("--heads", help="draft heads that were trained for the model")
    parser.add_argument("--depth", type=int, nargs="+", default=[0])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.engine == "gpu":
        machine.need_gpu()
    torch.set_num_threads(1)
    clock = time.perf_counter if asked.engine == "gpu" else time.process_time
    guessing = [
        *(f"draft:{draft}" for draft in asked.draft),
        *([f"heads:{asked.heads}"] if asked.heads else []),
        "ngram",
        "suffix",
    ]
    kinds = [("", 0), *((speculate, depth) for speculate in guessing for depth in asked.depth)]
    begun = prompts(asked.model)
    plain: dict[tuple[int, float], float] = {}
    lines = [
        "| answers | temperature | draft | depth | tokens/s | ratio | tokens a row | guesses a row |",
        "|" + "---|" * 8,
    ]
    for speculate, depth in kinds:
        engine = build_engine(asked.model, options_of(asked.engine, speculate, depth), lambda *_: None).engine
        for concurrency in CONCURRENCIES:
            for temperature in asked.temperature:
                reset(engine, depth)
                rate, drawn, guessed = measure(engine, begun[:concurrency], temperature, asked.seconds, clock)
                off = plain.setdefault((concurrency, temperature), rate)
                kind, _, path = speculate.partition(":")
                name = f"{kind} {Path(path).name}" if path else kind or "off"
                wanted = (depth or "chosen") if speculate else ""
                figures = f"{rate:,.0f} | {rate / off:.2f} | {drawn:.2f} | {guessed:.2f}"
                lines.append(f"| {concurrency} | {temperature:g} | {name} | {wanted} | {figures} |")
                print(lines[-1], flush=True)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        about = ", ".join(machine.describe().values())
        (asked.out / "speculation-demo.md").write_text("\n".join([about, "", *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
