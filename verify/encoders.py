"""Compares the vectors of an encoder in fewer bits with those of the encoder itself. Knows token ids, no layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from compress import text
from report import machine
from services.worker.build.encoders.assemble import BuiltEncoder, build_encoder
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from services.worker.runners.base import TextTokens
from verify.figures import number

Floats = npt.NDArray[np.float32]


def measure(
    base: Path,
    candidates: Sequence[Path],
    formats: Sequence[str],
    held_out: Sequence[str],
    windows: int,
    length: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Cosines of vectors (of scores, if there is a head) with the base's, over the beginnings of windows of text, of
    all lengths up to `length`.

    candidates: folders. formats: the base with its weights rounded so, as a worker rounds them. Raises CheckpointError,
    CompressError.
    """
    own = _load(base, None, device)
    if own.config.head is not None and len(own.config.head.labels) == 1 and windows == 1:
        raise CheckpointError("a head with one label is measured by several texts: set --windows to 2 or more")
    length = min(length, own.most_length)
    ids_WT = text.windows(list(held_out), base, length, windows)
    texts = [TextTokens(ids[: -(-length * (place + 1) // windows)].tolist()) for place, ids in enumerate(ids_WT)]
    wanted = _vectors(own, texts)
    found = []
    for folder, form in [*((each, None) for each in candidates), *((base, each) for each in formats)]:
        vectors = _vectors(_load(folder, form, device), texts)
        if vectors.shape != wanted.shape:
            raise CheckpointError(f"{folder}: vectors of {vectors.shape[1]} numbers, the base's have {wanted.shape[1]}")
        cosines = _cosines(vectors, wanted)
        name = folder.resolve().name if form is None else form
        found.append({"name": name, "cosine": float(cosines.min()), "cosine_mean": float(cosines.mean())})
    return {
        "base": {"name": base.resolve().name},
        "candidates": found,
        "texts": len(texts),
        "tokens": sum(len(each.token_ids) for each in texts),
        "device": device,
        "machine": machine.describe(),
    }


def _cosines(vectors: Floats, wanted: Floats) -> Floats:
    """Of each text's vectors. Of a head with one label: of how far the scores of all texts are from their mean, on
    which alone a ranking depends; the cosine of two single numbers would be that of their signs."""
    if wanted.shape[1] == 1:
        vectors, wanted = ((each - each.mean()).T for each in (vectors, wanted))
    return np.asarray((vectors * wanted).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(wanted, axis=1))


def show(result: dict[str, Any], out: Console) -> None:
    """Print a line for each candidate, and whether it passes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (f"{result['texts']} texts, {result['tokens']:,} tokens", "least cosine", "mean", ""):
        table.add_column(title, no_wrap=True)
    for each in result["candidates"]:
        failed = [f"{gate['gate']} (is {number(gate['value'])})" for gate in each["gates"] if not gate["holds"]]
        verdict = f"fails: {', '.join(failed)}" if failed else "passes"
        table.add_row(each["name"], f"{each['cosine']:.5f}", f"{each['cosine_mean']:.5f}", verdict)
    out.print(table)


def _load(folder: Path, form: str | None, device: str) -> BuiltEncoder:
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("--device cuda needs a GPU that torch can use")
    engine, dtype = ("torch", "float32") if device == "cpu" else ("gpu", "bfloat16")
    options = EngineOptions.model_validate({"engine": engine, "dtype": dtype, "quantize": form})
    try:
        return build_encoder(folder, options, lambda *_: None)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _vectors(built: BuiltEncoder, texts: Sequence[TextTokens]) -> Floats:
    runner = built.engine.runner
    return np.concatenate([runner.collect(runner.launch([each])).copy() for each in texts])
