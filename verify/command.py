"""Carries out `weft verify`: loads and compares models, applies the gates, prints a table, writes JSON and HTML."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compress.progress import Progress
from report import machine
from services.worker.errors import CheckpointError
from verify import compare, page, rounding, rows
from verify.drafts import measure_drafts
from verify.figures import ROWS, cell, draft_rows, number
from verify.gates import apply_gates, base_figures, figures
from verify.served import Served

SHOWN_ROWS = 5
"""Damaged rows that are printed if a row gate fails; JSON and HTML contain more."""


def measure(
    base: Path,
    candidates: Sequence[Path],
    windows_WT: Tensor,
    answers: int,
    progress: Progress,
    device: str = "cpu",
    drafts: Sequence[str] = (),
    depth: int = 4,
) -> dict[str, Any]:
    """Figures of all models, computed as by a worker on this device (cpu or cuda). drafts: proposers that guess for
    the base, as `--speculate` names them; depth: guesses of each in a step. Raises CheckpointError."""
    longest = max(windows_WT.shape[1], compare.PROMPT_TOKENS + compare.ANSWER_TOKENS)
    model, others = Served(base, longest, device), [Served(candidate, longest, device) for candidate in candidates]
    for other in others:
        if other.config.vocab_size != model.config.vocab_size:
            sizes = f"{other.config.vocab_size} tokens, the base {model.config.vocab_size}"
            raise CheckpointError(f"{other.folder}: its vocabulary has {sizes}: they do not compare")
    accepted = measure_drafts(base, drafts, depth, windows_WT, progress, device)
    own, tallies = compare.compare(model, others, windows_WT, answers, progress)
    of_base = base_figures(model, own)
    found = [rows.compare_rows(model, other, progress) for other in others]
    return {
        "base": of_base,
        "candidates": [figures(*each, of_base) for each in zip(others, tallies, found, strict=True)],
        "drafts": accepted,
        "tokens": windows_WT.numel(),
        "windows": list(windows_WT.shape),
        "device": device,
        "rounding": rounding.by_granularity(model),
        "machine": machine.describe(),
    }


def judge(result: dict[str, Any], limits: Mapping[str, float]) -> bool:
    """Add gates and verdict of each candidate to the result -> whether all pass."""
    for candidate in result["candidates"]:
        candidate["gates"] = apply_gates(candidate, limits)
        candidate["passes"] = all(gate["holds"] for gate in candidate["gates"])
    return all(candidate["passes"] for candidate in result["candidates"])


def show(result: Mapping[str, Any], out: Console) -> None:
    """Print a column for each model, then the failed gates."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{result['tokens']:,} held-out tokens")
    models = [result["base"], *result["candidates"]]
    if not out.is_terminal:
        out.width = 1000  # a file wraps nothing
    for model in models:
        table.add_column(model["name"], justify="right", no_wrap=True)
    for name, words, form in ROWS:
        table.add_row(words, *(cell(model, name, form) for model in models))
    out.print(table)
    if result["drafts"]:
        _show_drafts(result["drafts"], out)
    for candidate in result["candidates"]:
        failed = [f"{gate['gate']} (is {number(gate['value'])})" for gate in candidate["gates"] if not gate["holds"]]
        style, verdict = ("red", "fails: " + ", ".join(failed)) if failed else ("green", "passes")
        out.print(f"{candidate['name']} {verdict}", style=style, markup=False)
        if any(gate["figure"].startswith("row_") and not gate["holds"] for gate in candidate["gates"]):
            for finding in candidate["worst_rows"][:SHOWN_ROWS]:
                out.print(f"  {finding['text']}", markup=False, highlight=False)


def _show_drafts(drafts: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print a line for each draft and temperature."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("guesses that the base accepts", "temperature", "tokens a step"):
        table.add_column(name, justify="left" if name.startswith("g") else "right", no_wrap=True)
    for place in range(max(len(draft["by_depth"]) for draft in drafts)):
        table.add_column(f"guess {place + 1}", justify="right")
    for row in draft_rows(drafts):
        table.add_row(*row)
    out.print(table)


def save(result: Mapping[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    """Write the result as JSON and HTML, where a file is given."""
    if json_file is not None:
        _write(json_file, json.dumps(result, indent=1) + "\n")
    if html_file is not None:
        _write(html_file, page.page(result))


def _write(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
