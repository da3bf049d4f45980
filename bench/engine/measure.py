"""The bare engine loop on one GPU: decode, prefill and mixed steps of the 8B and 1B shapes with random weights, and
decode and prefill of other shapes, mixtures of experts among them.

    python -m bench.engine.measure [--models 8b 1b "8b int4" "30b-a3b fp8"] [--only NAME ...] [--fresh]
                                   [--out bench/results]

A row's floor is max(bytes / read bandwidth, FLOP / matrix rate), both measured in the same run. Cells that the results
already contain are not measured again unless --fresh is given. No network and no client take part; `bench.mesh.gpu`
measures with both.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench import table
from bench.engine.limits import LEAST, limits_of
from bench.engine.loop import CONTEXT, STEPS, Cell, Loop, closed, decode, mixed, prefill, prefill_on_and_on
from bench.kernels.timing import ceilings, sustained
from report import machine
from services.process import keep_pauses_short
from services.worker.build.choose import build_engine
from services.worker.job import Job, SamplingParams
from services.worker.loader import presets, streaming
from services.worker.loader.tensors import open_checkpoint
from services.worker.models.config import count_parameters
from services.worker.options import EngineOptions

MODELS = {
    "8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "70b": "llama-3.1-70b", "30b-a3b": "qwen3-30b-a3b",
    "8x7b": "mixtral-8x7b",
}  # fmt: skip
# A variant is a model, or a model and the format of its weights; with fp8 weights the KV cache is fp8, too.
PLAIN = ("8b", "1b")
ROUNDED = ("8b fp8", "8b int4", "1b fp8", "1b int4", "70b fp8", "70b int4")
EXPERTS = ("30b-a3b", "30b-a3b fp8", "8x7b", "8x7b fp8", "8x7b int4")
VARIANTS = (*PLAIN, *ROUNDED, *EXPERTS)
BATCHES = (1, 8, 32, 128, 256)
SHORT = 128


def cells(loop: Loop, seconds: float, model: str) -> Iterator[tuple[str, Callable[[], Cell]]]:
    """Name and measurement of each cell of a model; for quantized variants and experts only decode and prefill."""
    for tokens in (128, 1950):
        yield f"prefill {tokens}", lambda tokens=tokens: prefill(loop, tokens)  # type: ignore[misc]
    for batch in BATCHES:
        if batch > loop.engine.options.max_batch_size:
            break
        if batch * (CONTEXT + STEPS + 512) > loop.engine.memory.kv_tokens:
            break  # the KV cache of a 70B model does not fit beside its weights
        yield f"decode {batch}", lambda batch=batch: decode(loop, batch)  # type: ignore[misc]
    yield "decode 1, short", lambda: decode(loop, 1, SHORT)
    if model not in PLAIN:
        return
    yield "prefill 1950, back to back", lambda: prefill_on_and_on(loop, 1950)
    yield "mixed 32 + 8k", lambda: mixed(loop, 32, 8000, seconds)
    for width in BATCHES:
        yield f"loop 1950/200 {width}", lambda width=width: closed(loop, 1950, 200, width)  # type: ignore[misc]
    yield "loop 1950/200 256, 1800 shared", lambda: closed(loop, 1950, 200, 256, 1800)
    for width in (32, 256):
        yield f"loop 128/128 {width}", lambda width=width: closed(loop, 128, 128, width)  # type: ignore[misc]
    yield "loading", lambda: loading(loop)


def held(loop: Loop) -> Cell:
    """Bytes of the weights, of all and of the layers alone, relative to 16 bits; tokens that the KV pool holds."""
    model = loop.runner.model
    layers = [each.linear for each in model.projections() if each.modules != ("lm_head",)]
    products, numbers = sum(x.weight.nbytes for x in layers), sum(x.inputs * x.outputs for x in layers)
    return {
        "weights GiB": model.nbytes / 2**30,
        "of 16 bits": model.nbytes / (2 * count_parameters(model.config)),
        "products of 16 bits": products / (2 * numbers),
        "KV tokens": float(loop.engine.memory.kv_tokens),
    }


def returning(model: str, prompt: int) -> Cell:
    """Time to the first token of a prompt whose blocks are in host memory, and of one that must be computed."""
    options = EngineOptions(
        engine="gpu", max_batch_size=8, step_tokens=8192, max_seq_length=16384, kv_blocks=1100,
        host_kv_bytes=8 << 30,
    )  # fmt: skip
    engine = build_engine(presets.folder_of(MODELS[model]), options, lambda *_: None).engine
    prompts = [random.choices(range(100, 30_000), k=prompt) for _ in range(12)]
    times: list[float] = []
    fetched = 0
    for key, tokens in enumerate(prompts * 2):
        began = time.perf_counter()
        engine.submit(Job(key, tokens, prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
        while engine.has_work():
            fetched += sum(ended.cost.fetched_tokens for ended in engine.step().ended)
        times.append(time.perf_counter() - began)
    half = len(prompts)
    return {
        "computed ms": statistics.median(times[2:half]) * 1e3,
        "back from host ms": statistics.median(times[half:]) * 1e3,
        "fetched": fetched / half / prompt,
    }


def loading(loop: Loop) -> Cell:
    """Rates of reading and of loading a checkpoint of four shards with the model's weights."""
    model = loop.runner.model
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as home:
        folder = Path(home)
        tensors = {name: views[0].cpu() for name, views in model.destinations().items()}
        names = list(tensors)
        owners = {name: f"model-{place * 4 // len(names)}.safetensors" for place, name in enumerate(names)}
        for shard in sorted(set(owners.values())):
            save_file({name: tensors[name] for name in names if owners[name] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
        checkpoint = open_checkpoint(folder)
        size = sum(path.stat().st_size for path in checkpoint.shards)
        read = min(_seconds(lambda: streaming.read_through(checkpoint)) for _ in range(2))
        load = min(_seconds(lambda: streaming.stream_weights(model, checkpoint, lambda *_: None)) for _ in range(2))
    return {
        "GiB": size / 2**30,
        "read GiB/s": size / 2**30 / read,
        "load GiB/s": size / 2**30 / load,
        "share": read / load,
    }


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def start(model: str, limits: dict[str, float]) -> tuple[Loop, Cell]:
    """Start an engine with random weights -> the engine, and the seconds of each phase of the start."""
    phases: dict[str, float] = {}
    began = last = time.perf_counter()
    current = "checkpoint"

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal last, current
        now = time.perf_counter()
        phases[f"{current} s"] = phases.get(f"{current} s", 0.0) + now - last
        last, current = now, phase

    options = EngineOptions(
        engine="gpu", max_batch_size=128 if model in EXPERTS else 256, step_tokens=8192, chunk_tokens=200,
        max_seq_length=16384,
    )  # fmt: skip
    name, _, bits = model.partition(" ")
    if bits:
        options = options.model_copy(update={"quantize": bits, "kv_dtype": "fp8" if bits == "fp8" else "auto"})
    engine = build_engine(presets.folder_of(MODELS[name]), options, progress).engine
    progress("end", 0, 0)
    print(f"{model}: {engine.memory}", flush=True)
    loop = Loop(engine, limits_of(engine, limits, bits == "fp8"))
    keep_pauses_short()
    return loop, {**phases, "start s": time.perf_counter() - began}


def main() -> None:
    """Measure the cells that are missing; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["8b", "1b"], choices=VARIANTS)
    parser.add_argument("--only", nargs="*", help="only cells with these names, such as '8b decode 1'; *, ? match")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the mixed cell")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    wanted = parser.parse_args()
    machine.need_gpu()
    file = wanted.out / "engine.json"
    found = json.loads(file.read_text()) if file.exists() and not wanted.fresh else {"cells": {}}
    measured = {name: max(value, LEAST.get(name, 0.0)) for name, value in ceilings().items()}
    measured["sustained"] = sustained()
    torch.cuda.empty_cache()
    found |= {"machine": machine.describe(), "ceilings": measured}
    wanted.out.mkdir(parents=True, exist_ok=True)

    def note(name: str, measure: Callable[[], Cell]) -> None:
        if name in found["cells"] or not table.selected(name, wanted.only):
            return
        found["cells"][name] = measure()
        found.setdefault("commits", {})[name] = found["machine"].get("commit", "")
        print(name, _line(found["cells"][name]), flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
        (wanted.out / "engine.md").write_text(page(found))

    for model in wanted.models:
        gc.collect()
        torch.cuda.empty_cache()
        loop, phases = start(model, measured)
        note(f"{model} start", lambda phases=phases: phases)  # type: ignore[misc]
        note(f"{model} memory", partial(held, loop))
        for name, measure in cells(loop, wanted.seconds, model):
            note(f"{model} {name}", measure)
        loop.runner.kv.layers.clear()
        del loop
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        if model in PLAIN:
            note(f"{model} prefix of 1950 evicted to host memory", lambda model=model: returning(model, 1950))  # type: ignore[misc]


def page(found: dict[str, Any]) -> str:
    """The cells as Markdown, one table for each kind."""
    lines = ["# The bare engine loop", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    lines.append(
        f"- ceilings of the run: read {found['ceilings']['read'] / 1e12:.2f} TB/s, "
        f"bf16 product {found['ceilings']['matmul'] / 1e12:.0f} TFLOP/s, "
        f"{found['ceilings']['sustained'] / 1e12:.0f} TFLOP/s when it goes on for a second"
    )
    earlier: dict[str, list[str]] = {}
    for name, commit in found.get("commits", {}).items():
        if commit != found["machine"].get("commit", ""):
            earlier.setdefault(commit, []).append(name)
    lines += [f"- measured earlier, at commit {commit}: {'; '.join(names)}" for commit, names in earlier.items()]
    kinds: dict[tuple[str, ...], list[tuple[str, Cell]]] = {}
    for name, cell in found["cells"].items():
        kinds.setdefault(tuple(cell), []).append((name, cell))
    for columns, rows in kinds.items():
        lines += ["", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(map(_number, cell.values())) + " |" for name, cell in rows]
    return "\n".join(lines) + "\n"


def _line(cell: Cell) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in cell.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
