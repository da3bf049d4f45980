"""Measures one model on grids of GPUs: decode, prefill and a closed loop. Each grid runs in a process of its own.

    python -m bench.engine.grids [--model 8b] [--quantize fp8] [--grids 1x1 2x1 1x2] [--cells "decode 1" ...]
                                 [--out bench/results]
    python -m bench.engine.grids --model 30b-a3b --grids 1x1 2x1 2x1e 4x1 4x1e

A grid is tensor ranks x pipeline stages; with an e behind them, tensor ranks have whole experts. No network and no
client take part. "share" is that of the floor: what one GPU would take at the rates measured in the same run, divided
by the tensor ranks. vLLM's figures by the same load are in `bench/peers/vllm.toml`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import table
from bench.engine.limits import LEAST, Limits, limits_for
from bench.engine.loop import CONTEXT, STEPS, Cell, Driver, closed, first_token_times
from bench.kernels.timing import ceilings
from report import machine
from services.process import keep_pauses_short
from services.worker.build.choose import build_engine
from services.worker.loader import presets
from services.worker.options import EngineOptions

MODELS = {
    "8b": "llama-3.1-8b",
    "1b": "llama-3.2-1b",
    "70b": "llama-3.1-70b",
    "30b-a3b": "qwen3-30b-a3b",
    "8x7b": "mixtral-8x7b",
}
_GRID = r"[0-9]+x[0-9]+e?"
_ROUNDS = 4


def decode(driver: Driver, batch: int) -> Cell:
    """`batch` answers with about CONTEXT tokens each: the median of some rounds of steps. A step of a pipeline has a
    part of the answers."""
    driver.fill(batch, CONTEXT)
    rates = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        tokens = sum(len(driver.engine.step().tokens) for _ in range(STEPS // _ROUNDS))
        rates.append(tokens / (time.perf_counter() - began))
    driver.cancel_all()
    rate = statistics.median(rates)
    return {"ms of a token": batch / rate * 1e3, "tok/s": rate}


def prefill(driver: Driver, tokens: int) -> Cell:
    """The time to the first token of a prompt alone."""
    return {"ttft ms": statistics.median(first_token_times(driver, tokens)) * 1e3}


CELLS: dict[str, Callable[[Driver], Cell]] = {
    **{f"decode {batch}": lambda driver, batch=batch: decode(driver, batch) for batch in (1, 8, 32, 64, 256)},  # type: ignore[misc]
    **{f"prefill {tokens}": lambda driver, tokens=tokens: prefill(driver, tokens) for tokens in (128, 1950)},  # type: ignore[misc]
    **{f"loop 1950/200 {n}": lambda driver, n=n: closed(driver, 1950, 200, n) for n in (1, 32, 64, 256)},  # type: ignore[misc]
}


def shares(cell: Cell, name: str, limits: Limits, tensor: int) -> Cell:
    """The cell with its share of the floor, if it has one."""
    kind, size = name.split()[:2]
    if kind == "decode":
        return {**cell, "share": limits.decode_s(int(size), CONTEXT) / tensor * 1e3 / cell["ms of a token"]}
    if kind == "prefill":
        return {**cell, "share": limits.prefill_s(int(size)) / tensor * 1e3 / cell["ttft ms"]}
    return cell


def of_grid(model: str, quantize: str | None, grid: str, cells: list[str]) -> None:
    """Measure one grid in this process; a line of JSON for each cell."""
    tensor, pipeline = map(int, grid.removesuffix("e").split("x"))
    options = EngineOptions(
        engine="gpu", max_batch_size=256, step_tokens=8192, chunk_tokens=200, max_seq_length=8192,
        quantize=quantize, kv_dtype="fp8" if quantize == "fp8" else "auto", tensor_parallel=tensor,
        pipeline_parallel=pipeline, expert_parallel=grid.endswith("e"), dtype="bfloat16",
    )  # fmt: skip
    measured = {name: max(value, LEAST.get(name, 0.0)) for name, value in ceilings().items()}
    torch.cuda.empty_cache()
    print(json.dumps({"cell": "ceilings", **measured}), flush=True)
    began = time.perf_counter()
    built = build_engine(presets.folder_of(MODELS[model]), options, lambda *_: None, compile_ahead=True)
    print(json.dumps({"cell": "start", "seconds": time.perf_counter() - began}), flush=True)
    print(built.engine.memory, file=sys.stderr, flush=True)
    driver = Driver(built.engine, built.config.vocab_size)
    config, embedding = built.config, 2 * built.config.vocab_size * built.config.hidden_size
    weights = built.engine.memory.weights - (0 if config.tied_embeddings else embedding)
    limits = limits_for(config, weights, measured, fp8=quantize == "fp8")
    keep_pauses_short()
    for name in cells:
        cell = CELLS[name](driver)
        print(json.dumps({"cell": name, **(shares(cell, name, limits, tensor) if pipeline == 1 else cell)}), flush=True)


def measure(model: str, quantize: str | None, grid: str, cells: list[str]) -> dict[str, Any]:
    """Measure one grid in another process -> its cells."""
    command = [sys.executable, "-m", "bench.engine.grids", "--one", grid, "--model", model, "--cells", *cells]
    command += ["--quantize", quantize] if quantize else []
    found: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):  # The ranks' log.
                continue
            cell = json.loads(line)
            found[cell.pop("cell")] = cell
            print(f"{model} {quantize or 'bf16'} {grid}: {line.strip()}", flush=True)
    if process.returncode:
        raise SystemExit(f"the process of grid {grid} ended with exit code {process.returncode}")
    return found


def main() -> None:
    """Measure all grids; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--quantize", choices=["fp8", "int8", "int4"])
    parser.add_argument("--grids", nargs="*", default=["1x1", "2x1", "1x2"])
    parser.add_argument("--cells", nargs="*", default=list(CELLS), help="names of cells; * and ? match")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    wanted = parser.parse_args()
    if wrong := [grid for grid in wanted.grids if not re.fullmatch(_GRID, grid)]:
        parser.error(f"--grids: {wrong[0]} is not tensor ranks x stages such as 2x1, or 2x1e for whole experts")
    cells = [name for name in CELLS if table.selected(name, wanted.cells)]
    if wanted.one:
        of_grid(wanted.model, wanted.quantize, wanted.one, cells)
        return
    machine.need_gpu()
    file = wanted.out / "grids.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for grid in wanted.grids:
        name = f"{wanted.model} {wanted.quantize or 'bf16'} {grid}"
        measured = measure(wanted.model, wanted.quantize, grid, cells)
        found[name] = {"machine": machine.describe(), "cells": {**found.get(name, {}).get("cells", {}), **measured}}
        wanted.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
