"""Decode of a 1B-shape model on this machine's CPU, with plain and with quantized weights. Part of `make bench-cpu`.

    python -m bench.engine.cpu_weights [--shape llama-3.2-1b]

The bare engine with random weights, one kind after the other; of each the best of three rounds counts.
"""

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Mapping

from rich.console import Console

from bench import table
from bench.table import Figure
from services.worker.build.choose import BuiltEngine, build_engine
from services.worker.job import Job, SamplingParams
from services.worker.loader import presets
from services.worker.options import EngineOptions

SHAPE = "llama-3.2-1b"
THREADS = 2
BATCHES = (1, 8)
ROUNDS = 3
STEPS = 8
_PROMPT = 4
KINDS: Mapping[str, Mapping[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "int8, head int8": {"dtype": "bfloat16", "quantize": "int8", "quantize_head": "int8"},
    "int4, head int8": {"dtype": "bfloat16", "quantize": "int4", "quantize_head": "int8"},
}
"""Kind -> its settings; dtype is that of the weights which are not quantized."""


def rates(shape: str, kind: str) -> dict[int, float]:
    """Batch size -> tokens per second, for one kind of weights."""
    sizes = {"kv_blocks": 128, "max_batch_size": max(BATCHES), "max_seq_length": 256, "threads": THREADS}
    options = EngineOptions.model_validate({**sizes, **KINDS[kind]})
    built = build_engine(presets.folder_of(presets.PREFIX + shape), options, lambda phase, done, total: None)
    best = {batch: max(decode(built, batch) for _ in range(ROUNDS)) for batch in BATCHES}
    del built
    gc.collect()
    return best


def decode(built: BuiltEngine, batch: int) -> float:
    """Tokens per second of `batch` answers, after the first token of each."""
    engine = built.engine
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    for key in range(batch):
        prompt = random.choices(range(100, built.config.vocab_size - 300), k=_PROMPT)
        engine.submit(Job(key, prompt, _PROMPT, params, bypass_cache=True))
    begun: set[int] = set()
    while len(begun) < batch:
        begun |= {token.key for token in engine.step().tokens}
    began = time.perf_counter()
    tokens = sum(len(engine.step().tokens) for _ in range(STEPS))
    seconds = time.perf_counter() - began
    assert tokens == batch * STEPS, f"{tokens} tokens came"
    for key in range(batch):
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    return tokens / seconds


def measure(shape: str = SHAPE) -> list[Figure]:
    """The rates, and their ratios to plain weights."""
    found = {kind: rates(shape, kind) for kind in KINDS}
    figures = [
        Figure(f"{shape}, {kind}, batch {batch}", rate, "tokens/s", note="decode only, 2 threads")
        for batch in BATCHES
        for kind, rate in ((kind, found[kind][batch]) for kind in KINDS)
    ]
    for plain in ("float32", "bfloat16"):
        fastest = max(found["int8"][1], found["int4"][1])
        figures.append(
            Figure(f"the faster of int8 and int4 against {plain}, batch 1", fastest / found[plain][1], "x", ">= 1")
        )
    return figures


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Measures decode on this processor by kind of weight.")
    parser.add_argument("--shape", default=SHAPE, choices=list(presets.PRESETS), help="which random model")
    asked = parser.parse_args()
    out = Console(width=150 if not sys.stdout.isatty() else None)
    table.show_machine(out)
    table.show(f"Quantized weights (load average {os.getloadavg()[0]:.1f})", measure(asked.shape), out)


if __name__ == "__main__":
    main()
