"""Speculation on one GPU: an 8B shape with a 1B-shape draft at forced acceptance, and n-grams on copying answers.

    python -m bench.speculation.gpu [--kinds draft copying] [--model llama-3.1-8b] [--draft llama-3.2-1b]
        [--draft-quantize int4] [--rows 1 4 8 16 64 256] [--acceptance 0.7 0.5 0.9] [--seconds 420] [--out FOLDER]

Tokens/s and the time between tokens for each number of answers, without guesses and with them; the depth is chosen
unless a row sets it. `draft`: guesses of a draft model count as right with a set chance, whatever is drawn; with
`--draft pard-llama-3.2-1b` one pass makes all guesses of a step.
`copying`: n-grams and suffixes guess answers that copy. Random weights do not copy, so these have a head that does
(`bench.engine.copying`): after each token the next one of its cycle of 512 is the likeliest, a prompt shows its cycle
once, and the answer goes through it again and again. A step costs what it costs with any other weights; how often real
answers copy is another question. All rows of a kind are those of one engine; without guesses it runs as one that has
none. A cell that no longer fits into the time is left out, and named.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import figures
from bench.engine.copying import make_copying, walk
from bench.speculation.cells import CONTEXT, PACES, Cell, measure
from report import machine
from services.process import keep_pauses_short
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.loader import presets
from services.worker.loader.config import load_config
from services.worker.options import EngineOptions
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.speculative.ngram import NgramProposer
from services.worker.speculative.speculation import Speculation
from services.worker.speculative.suffix import SuffixProposer

CONCURRENCIES = (1, 4, 8, 16, 64, 256)
COPYING = (1, 4, 8)
ACCEPTANCES = (0.7, 0.5, 0.9)
FIXED_DEPTH, FIXED_ACCEPTANCE, FIXED_ROWS = 4, 0.7, (1, 8)
"""The cells with a set depth beside those with the chosen one."""
LEAST_RATIO = 0.97
COLUMNS = ("tok/s", "ratio", "k", "rows guessed", "right")


def open_engine(model: str, **options: Any) -> GenerationEngine:
    """An engine of random weights, the same for every call. Its process collects garbage as one that serves does."""
    settings: dict[str, Any] = {
        "engine": "gpu", "dtype": "bfloat16", "max_seq_length": 16384, "kv_blocks": 36000, **options,
    }  # fmt: skip
    engine = build_engine(presets.folder_of(model), EngineOptions(**settings), lambda *_: None).engine
    keep_pauses_short()  # One pause of 150 ms would be a fourteenth of a cell.
    return engine


def close(engine: GenerationEngine) -> None:
    """Free the engine's memory."""
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    runner.kv.layers.clear()
    gc.collect()
    torch.cuda.empty_cache()


def reset(engine: GenerationEngine, speculation: Speculation, acceptance: float, depth: int | None) -> None:
    """Forget what was measured, and force this acceptance. The graphs are captured anew."""
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    engine.speculation = speculation.fresh(depth)
    if runner.forward.forced_acceptance != acceptance:
        runner.force_acceptance(acceptance)


def drafted(
    model: str, draft: str, quantize: str | None, rows: Sequence[int], acceptances: Sequence[float]
) -> Iterator[tuple[str, Cell]]:
    """Name and figures of the cells with a draft model, and of those without guesses."""
    speculate = f"draft:{presets.PREFIX}{draft}"
    engine = open_engine(model, speculate=speculate, draft_quantize=quantize, max_batch_size=max(rows))
    speculation, engine.speculation = engine.speculation, None
    assert speculation is not None
    for count in rows:
        yield f"off {count}", measure(engine, count)
    for acceptance in acceptances:
        for count in rows:
            reset(engine, speculation, acceptance, None)
            yield f"draft {acceptance} {count}", measure(engine, count)
        for count in [count for count in rows if count in FIXED_ROWS and acceptance == FIXED_ACCEPTANCE]:
            reset(engine, speculation, acceptance, FIXED_DEPTH)
            yield f"draft {acceptance}, k = {FIXED_DEPTH} {count}", measure(engine, count)
    close(engine)


def copying(model: str, rows: Sequence[int]) -> Iterator[tuple[str, Cell]]:
    """Name and figures of the cells with answers that copy."""
    engine = open_engine(model, speculate="ngram", max_batch_size=max(rows))
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    make_copying(runner.model, CONTEXT)
    vocabulary = runner.model.config.vocab_size
    prompts = [walk(CONTEXT * key + 7 * key, CONTEXT, CONTEXT, vocabulary) for key in range(max(rows))]
    speculation = engine.speculation
    assert speculation is not None
    for name, proposer in (("off", None), ("ngram", NgramProposer()), ("suffix", SuffixProposer())):
        for count in rows:
            engine.speculation = speculation.fresh(None, proposer) if proposer else None
            yield f"copying {name} {count}", measure(engine, count, prompts[:count])
    close(engine)


def beside(cells: Mapping[str, Cell], name: str) -> Cell | None:
    """The cell without guesses of the same answers; None: it is the one, or was not measured."""
    kind, _, count = name.rpartition(" ")
    plain = "copying off" if kind.startswith("copying") else "off"
    return None if kind == plain else cells.get(f"{plain} {count}")


def save(out: Path, result: Mapping[str, Any]) -> None:
    """Write the cells as JSON and as a table, and the speed-up by a draft over the number of requests."""
    out.mkdir(parents=True, exist_ok=True)
    parallel = _is_parallel(result["settings"]["draft"])
    name = "speculation-parallel" if parallel else "speculation"
    if "draft" not in result["settings"]["kinds"]:
        name = "speculation-copying"
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = ["# Speculation: the bare engine on one GPU", ""]
    lines += [f"- {name}: {value}" for group in ("machine", "settings") for name, value in result[group].items()]
    lines += ["- k: guesses of a row on average; right: share of the guesses", *_ABOUT_PACES, ""]
    lines += ["| " + " | ".join(["", *COLUMNS, *PACES]) + " |", "|---" * (len(COLUMNS) + len(PACES) + 1) + "|"]
    points: dict[str, list[tuple[float, float]]] = {}
    for row, cell in result["cells"].items():
        lines.append(f"| {row} | " + " | ".join(_row(cell, beside(result["cells"], row))) + " |")
        kind, _, concurrency = row.rpartition(" ")
        if kind.startswith("draft") and "k =" not in kind:
            points.setdefault(kind.replace("draft", "acceptance"), []).append((float(concurrency), cell["ratio"]))
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")
    if points:
        title = f"Speed-up by a {'parallel ' if parallel else ''}draft model, {result['settings']['model']}"
        lines_of = {kind: sorted(line) for kind, line in points.items()}
        figures.write(out / f"{name}.svg", title, lines_of, "tokens/s over those without guesses")


_ABOUT_PACES = (
    "- in brackets: the same without guesses",
    "- ms output: from one output of an answer to the next, as a client sees it; the tokens of a step come together",
    "- ms token: that time shared by the tokens of the output; ms 64 tokens: of 64 tokens one after another, for each",
)


def _is_parallel(draft: str) -> bool:
    """Whether the draft model makes all guesses in one pass."""
    return load_config(presets.folder_of(draft)).mask_token is not None


def _row(cell: Cell, off: Cell | None) -> list[str]:
    found = [_number(cell[column]) if column in cell else "" for column in COLUMNS]
    return found + [_number(cell[pace]) + (f" ({_number(off[pace])})" if off else "") for pace in PACES]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cells(asked: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """Name and figures of each cell that is asked for."""
    if "draft" in asked.kinds:
        yield from drafted(asked.model, asked.draft, asked.draft_quantize, asked.rows, asked.acceptance)
    if "copying" in asked.kinds:
        yield from copying(asked.model, [count for count in asked.rows if count in COPYING] or COPYING)


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("draft", "copying"), default=["draft", "copying"])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--draft", default="llama-3.2-1b")
    parser.add_argument("--draft-quantize", default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--acceptance", type=float, nargs="+", default=list(ACCEPTANCES))
    parser.add_argument("--seconds", type=float, default=420.0, help="time for the measurements")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    asked = parser.parse_args()
    machine.need_gpu()
    began = time.perf_counter()
    found: dict[str, Cell] = {}
    for name, cell in cells(asked):
        off = beside(found, name)
        if off is not None:
            cell["ratio"] = cell["tok/s"] / off["tok/s"]
        found[name] = cell
        taken = time.perf_counter() - began
        print(f"{taken:.0f} s, {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in cell.items()), flush=True)
        if taken > asked.seconds:
            print("the time is over: later cells are left out", flush=True)
            break
    settings = {name: str(value) for name, value in vars(asked).items() if name != "out"}
    save(asked.out, {"machine": machine.describe(), "settings": settings, "cells": found})
    return int(any(cell.get("ratio", 1.0) < LEAST_RATIO for cell in found.values()))


if __name__ == "__main__":
    sys.exit(main())
