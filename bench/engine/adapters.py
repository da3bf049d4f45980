"""Decode of a batch whose rows have no adapter, one adapter, or many, mixed with rows without one: `make bench-lora`.

    python -m bench.engine.adapters [--model FOLDER] [--batch 64] [--adapters 32] [--rank 16] [--rounds 5]

The bare engine, on a GPU with the 8B shape and random weights, else on the CPU with the demo model. The kinds take
turns, and of each the median round counts. Times are the processor's on a CPU, and those of the clock on a GPU.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.console import Console

from bench import table
from bench.table import Figure
from services.worker.build.choose import BuiltEngine, build_engine, resolve_engine
from services.worker.job import Adapter, Job, SamplingParams
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.cuda.runner import GpuRunner
from weft.launch.demo_model import model_folder

SHAPE = "llama-3.1-8b"
GOALS = {"one adapter": 0.92, "mixed": 0.85}
"""Shares of the base's tokens per second, on a GPU."""
_PROMPT, _STEPS, _SETTLED = 32, 32, 4


def opened(model: str, batch: int, adapters: int, rank: int) -> BuiltEngine:
    """An engine with a slot for each adapter."""
    sizes = {"max_batch_size": batch, "max_seq_length": 512, "kv_blocks": batch * 8}
    options = EngineOptions.model_validate({**sizes, "adapter_slots": adapters, "adapter_rank": rank})
    on_gpu = torch.cuda.is_available()
    folder = Path(model) if model else presets.folder_of(presets.PREFIX + SHAPE) if on_gpu else model_folder()
    return build_engine(folder, resolve_engine(options), lambda *_: None)


def random_adapters(built: BuiltEngine, count: int, rank: int) -> list[Adapter]:
    """Adapters of all products, with random matrices. They share one host copy; each has its own slot."""
    runner = built.engine.runner
    assert isinstance(runner, CpuRunner | GpuRunner)
    assert runner.adapters is not None
    stored = {
        module: (torch.randn(rank, product.inputs) / product.inputs**0.5, torch.randn(outputs, rank) / 100)
        for product in runner.model.adaptable()
        for module, outputs in zip(product.modules, product.outputs, strict=True)
    }
    weights, nbytes = runner.adapters.prepare(stored)
    return [Adapter(f"{place}", place.to_bytes(32, "little"), rank, nbytes, weights) for place in range(1, count + 1)]


def decode_s(built: BuiltEngine, rows: list[Adapter | None], clock: Callable[[], float]) -> float:
    """Seconds of a step in which each of these rows decodes a token."""
    engine = built.engine
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for key, adapter in enumerate(rows):
        prompt = random.choices(range(10, built.config.vocab_size - 300), k=_PROMPT)
        engine.submit(Job(key, prompt, _PROMPT, params, bypass_cache=True, adapter=adapter))
    begun: set[int] = set()
    while len(begun) < len(rows):
        begun |= {token.key for token in engine.step().tokens}
    for _ in range(_SETTLED):
        engine.step()
    began = clock()
    tokens = sum(len(engine.step().tokens) for _ in range(_STEPS))
    seconds = (clock() - began) / _STEPS
    assert tokens == len(rows) * _STEPS, f"{tokens} tokens came"
    for key in range(len(rows)):
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    return seconds


def kinds(adapters: list[Adapter], batch: int) -> Mapping[str, list[Adapter | None]]:
    """The rows of each kind of batch. In the mixed one every third row has no adapter."""
    mixed = [adapters[row % len(adapters)] if row % 3 else None for row in range(batch)]
    return {"base": [None] * batch, "one adapter": [adapters[0]] * batch, "mixed": mixed}


def measure(model: str, batch: int, adapters: int, rank: int, rounds: int) -> list[Figure]:
    """Tokens per second of each kind, and their shares of the base's."""
    built = opened(model, batch, adapters, rank)
    on_gpu = built.engine.options.on_gpu
    clock = time.perf_counter if on_gpu else time.process_time
    rows = kinds(random_adapters(built, adapters, rank), batch)
    times: dict[str, list[float]] = {kind: [] for kind in rows}
    for _ in range(rounds):
        for kind, chosen in rows.items():
            times[kind].append(decode_s(built, chosen, clock))
    rates = {kind: batch / statistics.median(each) for kind, each in times.items()}
    note = f"batch {batch}, {adapters} adapters of rank {rank}, {rounds} rounds"
    figures = [Figure(f"decode, {kind}", rate, "tokens/s", note=note) for kind, rate in rates.items()]
    for kind, goal in GOALS.items():
        wanted = f">= {goal}" if on_gpu else ""
        figures.append(Figure(f"{kind} against the base", rates[kind] / rates["base"], "x", wanted))
    return figures


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Measures decode with adapters, on a GPU if there is one.")
    parser.add_argument("--model", default="", help="folder of a checkpoint; empty: the 8B shape, or the demo model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    out = Console(width=150 if not sys.stdout.isatty() else None)
    table.show_machine(out)
    figures = measure(asked.model, asked.batch, asked.adapters, asked.rank, asked.rounds)
    table.show(f"Adapters (load average {os.getloadavg()[0]:.1f})", figures, out)


if __name__ == "__main__":
    main()
