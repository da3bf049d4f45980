"""Speculation on a CPU: tokens/s of the demo model without guesses and with each proposer, at a few concurrencies.

    python -m bench.engine.speculation_cpu [--model models/weft-story-11m] [--draft models/weft-story-2m] [--seconds 4]

Answers begin at random tokens, greedy and sampled. The depth is chosen by what is measured, as in service.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.options import EngineOptions

CONCURRENCIES = (1, 4, 16)
SETTLE_STEPS = 60
MOST_TOKENS = 400


def measure(engine: GenerationEngine, concurrency: int, temperature: float, seconds: float) -> tuple[float, float]:
    """-> tokens per second, and the share of guesses that were right."""
    for key in range(concurrency):
        source = random.Random(key)
        prompt = source.choices(range(100, 2000), k=12)
        params = SamplingParams(max_tokens=MOST_TOKENS, temperature=temperature, seed=key, ignore_eos=True)
        engine.submit(Job(key, prompt, len(prompt), params, bypass_cache=True))
    for _ in range(SETTLE_STEPS):
        engine.step()
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds and engine.has_work():
        tokens += len(engine.step().tokens)
    took = time.perf_counter() - began
    for key in range(concurrency):
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    counts = engine.stats().guesses
    return tokens / took, counts.accepted / max(counts.drafted, 1)


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/weft-story-11m"))
    parser.add_argument("--draft", default="models/weft-story-2m")
    parser.add_argument("--seconds", type=float, default=4.0)
    asked = parser.parse_args()
    for concurrency in CONCURRENCIES:
        for temperature in (0.0, 0.8):
            plain = 0.0
            for speculate in ("", f"draft:{asked.draft}", "ngram", "suffix"):
                options = EngineOptions(engine="torch", speculate=speculate, max_batch_size=16, max_seq_length=512)
                engine = build_engine(asked.model, options, lambda *_: None).engine
                rate, right = measure(engine, concurrency, temperature, asked.seconds)
                plain = plain or rate
                name = speculate.partition(":")[0] or "off"
                figures = f"{rate:,.0f} tokens/s, {rate / plain:.2f}x, {right:.0%} right"
                print(f"{concurrency} at temperature {temperature:g}, {name}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
