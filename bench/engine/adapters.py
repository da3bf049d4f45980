"""Decode of a batch whose rows have no adapter, one adapter, or many, mixed with rows without one: `make bench-lora`.

    python -m bench.engine.adapters [--model FOLDER] [--batch 64] [--adapters 32] [--rank 16] [--rounds 3]
                                    [--contexts 32 2100] [--tensor-parallel 2]

The bare engine, on a GPU with the 8B shape and random weights, else on the CPU with the demo model. Adapters change all
products of the layers, or queries and values alone, PEFT's default for a Llama.
The kinds of batches take turns, and of each the median round counts. Times are the processor's on a CPU, and those of
the clock on a GPU.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from bench import table
from bench.table import Figure
from services.worker.build.choose import BuiltEngine, build_engine, resolve_engine
from services.worker.job import Adapter, Job, SamplingParams
from services.worker.loader import presets
from services.worker.models.decoder import Decoder
from services.worker.options import EngineOptions
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.ranks import RanksRunner
from weft.launch.demo_model import model_folder

SHAPE = "llama-3.1-8b"
GOALS = {"one": 0.92, "mixed": 0.85}
"""Shares of the base's tokens per second, on a GPU."""
MODULES = {"all products": "", "q and v": r"\.(q_proj|v_proj)$"}
"""What adapters change: a pattern of modules' names."""
_STEPS, _SETTLED, _MOST = 32, 4, 640
"""Steps that are timed, steps before them, and most tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that decode."""

    name: str
    context: int
    """Tokens of each prompt."""
    rows: list[Adapter | None]
    goal: float = 0.0
    """The least share of the base's tokens per second; 0: it is the base."""


def opened(asked: argparse.Namespace) -> BuiltEngine:
    """An engine with a slot for each adapter."""
    batch, model, length = asked.batch, asked.model, max(asked.contexts) + _MOST
    sizes = {"max_batch_size": batch, "max_seq_length": length, "kv_blocks": batch * (-(-length // 16) + 1)}
    adapted = {"adapter_slots": asked.adapters, "adapter_rank": asked.rank, "tensor_parallel": asked.tensor_parallel}
    options = EngineOptions.model_validate({**sizes, **adapted})
    on_gpu = torch.cuda.is_available()
    folder = Path(model) if model else presets.folder_of(presets.PREFIX + SHAPE) if on_gpu else model_folder()
    return build_engine(folder, resolve_engine(options), lambda *_: None)


def random_adapters(built: BuiltEngine, count: int, rank: int, modules: str = "") -> list[Adapter]:
    """Adapters of all modules whose names have this pattern, with random matrices. They share one host copy; each has
    its own slot."""
    whole = Decoder(built.config, ReferenceOps(), torch.float32, 1, "meta", meta_linears=True)
    stored = {}
    for product in whole.adaptable():
        for module, outputs in zip(product.modules, product.outputs, strict=True):
            if re.search(modules, module):
                name = f"base_model.model.{module}.lora_"
                stored[f"{name}A.weight"] = torch.randn(rank, product.inputs) / product.inputs**0.5
                stored[f"{name}B.weight"] = torch.randn(outputs, rank) / 100
    assert stored, f"no module is named {modules}"
    with tempfile.TemporaryDirectory(prefix="weft-adapters-") as folder:
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        save_file(stored, Path(folder) / "adapter_model.safetensors")
        one = built.read_adapter("one", folder)
    names = [f"{modules} {place}" for place in range(count)]
    return [replace(one, name=name, fingerprint=sha256(name.encode()).digest()) for name in names]


def decode_s(built: BuiltEngine, batch: Batch, clock: Callable[[], float]) -> float:
    """Seconds of a step in which each row decodes a token."""
    engine = built.engine
    params = SamplingParams(max_tokens=_MOST, temperature=0.0, ignore_eos=True)
    for key, adapter in enumerate(batch.rows):
        prompt = random.choices(range(10, built.config.vocab_size - 300), k=batch.context)
        engine.submit(Job(key, prompt, batch.context, params, bypass_cache=True, adapter=adapter))
    begun: set[int] = set()
    while len(begun) < len(batch.rows):
        begun |= {token.key for token in engine.step().tokens}
    for _ in range(_SETTLED):
        engine.step()
    began = clock()
    tokens = sum(len(engine.step().tokens) for _ in range(_STEPS))
    seconds = (clock() - began) / _STEPS
    assert tokens == len(batch.rows) * _STEPS, f"{tokens} tokens came"
    for key in range(len(batch.rows)):
        engine.cancel(key)
    while engine.has_work():
        engine.step()
    return seconds


def batches(adapters: Mapping[str, list[Adapter]], size: int, context: int) -> Iterator[Batch]:
    """The base, then the others. adapters: by what they change. In a mixed batch every third row has no adapter."""
    yield Batch(f"{context} tokens, base", context, [None] * size)
    for modules, some in adapters.items():
        mixed = [some[row % len(some)] if row % 3 else None for row in range(size)]
        name = f"{context} tokens, {modules},"
        yield Batch(f"{name} one adapter", context, [some[0]] * size, GOALS["one"])
        yield Batch(f"{name} {len(some)} mixed", context, mixed, GOALS["mixed"])


def measure(asked: argparse.Namespace) -> Iterator[Figure]:
    """Tokens per second of each kind of batch, and their shares of the base's."""
    built = opened(asked)
    on_gpu = built.engine.options.on_gpu
    clock = time.perf_counter if on_gpu else time.process_time
    adapters = {name: random_adapters(built, asked.adapters, asked.rank, modules) for name, modules in MODULES.items()}
    for context in asked.contexts:
        kinds = list(batches(adapters, asked.batch, context))
        rounds = [[decode_s(built, kind, clock) for kind in kinds] for _ in range(asked.rounds)]
        base, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
        yield Figure(kinds[0].name, asked.batch / base, "tokens/s")
        for kind, seconds in zip(kinds[1:], others, strict=True):
            goal = f">= {kind.goal}" if on_gpu else ""
            note = f"{asked.batch / seconds:,.0f} tokens/s, {(seconds - base) * 1e3:.3f} ms a step more"
            yield Figure(kind.name, base / seconds, "x", goal, note)
    if isinstance(built.engine.runner, RanksRunner):
        built.engine.runner.close()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Measures decode with adapters, on a GPU if there is one.")
    parser.add_argument("--model", default="", help="folder of a checkpoint; empty: the 8B shape, or the demo model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks, on GPUs each on one")
    parser.add_argument("--rounds", type=int, default=3)
    contexts = [32, 2100] if torch.cuda.is_available() else [32]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, help="tokens of the prompts")
    asked = parser.parse_args()
    out = Console(width=150 if not sys.stdout.isatty() else None)
    table.show_machine(out)
    title = f"batch {asked.batch}, adapters of rank {asked.rank}, {asked.rounds} rounds"
    table.show(f"Adapters: {title} (load average {os.getloadavg()[0]:.1f})", list(measure(asked)), out)


if __name__ == "__main__":
    main()
