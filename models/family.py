"""Makes the demo model's family, proves it and writes its table: `python -m models.family --out FOLDER`.

A member whose folder is there already is only measured, so an interrupted run goes on, and what was made
elsewhere counts.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compress import text
from compress.errors import CompressError
from compress.progress import Progress, bars
from compress.prune.shrink import Cut, shrink
from compress.quantize.awq import Awq
from compress.quantize.fp8 import Fp8
from compress.quantize.int8 import Int8
from compress.quantize.recipe import Recipe
from compress.quantize.run import quantize
from compress.training.run import Plan
from report.console import console
from services.worker.errors import CheckpointError
from verify import command
from verify.gates import LIMITS

BASE = Path(__file__).with_name("weft-story-11m")
DRAFT = Path(__file__).with_name("weft-story-2m")
HEAL = Plan(steps=60, batch=4, learning_rate=5e-4)
"""Minutes on two cores; with a corpus and a GPU, more of both pays."""
Maker = Callable[[Path, Tensor, Progress], object]


def _quantized(recipe: Recipe) -> Maker:
    return lambda out, windows, progress: quantize(
        BASE, out, recipe, windows[:64] if recipe.calibrated else None, progress
    )


QUANTIZED: Mapping[str, Maker] = {
    "int8": _quantized(Int8()),
    "int8-per-tensor": _quantized(Int8(per_tensor=True)),
    "int8-w8a8": _quantized(Int8(dynamic=True)),
    "fp8": _quantized(Fp8()),
    "int4-awq": _quantized(Awq(group=32)),
}
CHANGED: Mapping[str, Maker] = {
    "pruned": lambda out, windows, progress: shrink(BASE, out, windows, Cut(neurons=0.25), HEAL, progress),
}
_COLUMNS = ("", "bytes on disk", "in memory", "perplexity", "KL", "cosine", "same likeliest", "tokens/s", "gate")


def main(argv: list[str] | None = None) -> None:
    """Make what is missing, measure everything, write table and report; the exit code is 1 if a gate fails."""
    parser = argparse.ArgumentParser(prog="python -m models.family", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for a checkpoint per member, table and report")
    parser.add_argument("--text", type=Path, default=text.CALIBRATION, help="text to calibrate and heal on")
    parser.add_argument("--windows", type=int, default=8, help="held-out windows of 512 tokens to measure on")
    try:
        passes = _make(parser.parse_args(argv))
    except (CompressError, CheckpointError) as error:
        sys.exit(f"demo-family: {error}")
    sys.exit(0 if passes else 1)


def _make(options: argparse.Namespace) -> bool:
    """-> whether all members pass. Raises CompressError and CheckpointError."""
    options.out.mkdir(parents=True, exist_ok=True)
    calibration = text.windows(text.read(options.text), BASE, 256)
    for name, make in {**QUANTIZED, **CHANGED}.items():
        if not (options.out / name).exists():
            print(f"making {name}", flush=True)
            with bars() as progress:
                make(options.out / name, calibration, progress)
    held_out = text.windows(text.read(text.HELD_OUT), BASE, 512, options.windows)
    with bars() as progress:
        members = [*(options.out / name for name in (*QUANTIZED, *CHANGED)), DRAFT]
        result = command.measure(BASE, members, held_out, min(4, options.windows), progress)
    passes = _judge(result)
    command.show(result, console())
    command.save(result, options.out / "family.json", options.out / "family.html")
    (options.out / "FAMILY.md").write_text(table(result), encoding="utf-8")
    return passes


def table(result: Mapping[str, Any]) -> str:
    """The family as Markdown."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---|" + "---:|" * (len(_COLUMNS) - 2) + "---|"]
    base = result["base"]
    lines.append(_row(base, "0", "1", "100%", ""))
    for member in result["candidates"]:
        cosine = "" if member["cosine"] is None else f"{member['cosine']:.4f}"
        verdict = "passes" if member["passes"] else "fails"
        lines.append(_row(member, f"{member['kl']:.4f}", cosine, f"{member['top1']:.1%}", verdict))
    return "\n".join(lines) + "\n"


def _judge(result: dict[str, Any]) -> bool:
    """Quantized members must be the base, the others only nearly as good."""
    quantized, changed = (
        result | {"candidates": [member for member in result["candidates"] if (member["name"] in QUANTIZED) is same]}
        for same in (True, False)
    )
    verdicts = [command.judge(quantized, LIMITS["quantized"]), command.judge(changed, LIMITS["changed"])]
    return all(verdicts)


def _row(member: Mapping[str, Any], kl: str, cosine: str, top1: str, verdict: str) -> str:
    sizes = (f"{member['file_bytes'] / 1e6:.1f} MB", f"{member['memory_bytes'] / 1e6:.1f} MB")
    cells = (
        member["name"],
        *sizes,
        f"{member['perplexity']:.2f}",
        kl,
        cosine,
        top1,
        f"{member['tokens_per_second']:,.0f}",
    )
    return "| " + " | ".join((*cells, verdict)) + " |"


if __name__ == "__main__":
    main()
