"""Speculation on a CPU: tokens/s of the demo model without guesses and with each proposer, at a few concurrencies.

    python -m bench.engine.speculation_cpu [--model models/weft-story-11m] [--draft models/weft-story-2m]
        [--heads FOLDER] [--depth 0 2 4] [--seconds 4]

Answers go on from held-out text, greedy and sampled. A depth of 0 is chosen by what is measured, as in service. Seconds
are those of the processor, with one thread: other programs on the machine change them little.
"""

import argparse
import gzip
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.options import EngineOptions

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


def measure(
    engine: GenerationEngine, begun: Sequence[list[int]], temperature: float, seconds: float
) -> tuple[float, float]:
    """-> tokens per second of processor time, and the tokens that a row of guesses draws on average."""
    for key, prompt in enumerate(begun):
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=temperature, seed=key, ignore_eos=True)
        engine.submit(Job(key, prompt, len(prompt), params, bypass_cache=True))
    for _ in range(SETTLE_STEPS):
        engine.step()
    tokens, began, before = 0, time.process_time(), engine.stats().guesses
    # An answer that has ended would make the batch smaller.
    while time.process_time() - began < seconds and not (output := engine.step()).ended:
        tokens += len(output.tokens)
    took = time.process_time() - began
    for key in range(len(begun)):
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    counts = engine.stats().guesses
    rows = counts.rows - before.rows
    return tokens / took, 1 + (counts.accepted - before.accepted) / max(rows, 1)


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/weft-story-11m"))
    parser.add_argument("--draft", default="models/weft-story-2m")
    parser.add_argument("--heads", help="draft heads that were trained for the model")
    parser.add_argument("--depth", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    guessing = [f"draft:{asked.draft}", *([f"heads:{asked.heads}"] if asked.heads else []), "ngram", "suffix"]
    kinds = [("", 0), *((speculate, depth) for speculate in guessing for depth in asked.depth)]
    begun = prompts(asked.model)
    for concurrency in CONCURRENCIES:
        for temperature in (0.0, 0.8):
            plain = 0.0
            for speculate, depth in kinds:
                options = EngineOptions(
                    engine="torch", speculate=speculate, speculate_depth=depth or None, max_batch_size=16,
                    max_seq_length=512, threads=1,
                )  # fmt: skip
                engine = build_engine(asked.model, options, lambda *_: None).engine
                rate, length = measure(engine, begun[:concurrency], temperature, asked.seconds)
                plain = plain or rate
                name = f"{speculate.partition(':')[0]}, depth {depth or 'chosen'}" if speculate else "off"
                figures = f"{rate:,.0f} tokens/s, {rate / plain:.2f}x, {length:.2f} tokens a row of guesses"
                print(f"{concurrency} at temperature {temperature:g}, {name}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
