"""Times every kernel on one GPU, against the ceilings of the same run and against torch for the same operation.

    python -m bench.kernels.measure [--only KEY ...] [--fresh] [--out bench/results]

A cell is a CUDA graph of many launches over random data, in buffers that together exceed the L2 cache; the median
replay counts. Its floor is max(bytes / read bandwidth, FLOP / matrix rate), both measured at the start. Cells that the
results already contain are not measured again unless --fresh is given.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench.kernels.cells import SHAPES, Row
from bench.kernels.cells.attention import chunk_row, decode_row, prefill_row
from bench.kernels.cells.linear import invariant_row, layer_products, product_row, quantized_row, rotated_row
from bench.kernels.cells.small import blocks_row, layer_rows, sampling_row
from bench.kernels.timing import DTYPE, ceilings
from bench.table import selected
from kernels import kv_pages
from report.machine import need_gpu

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 2048)


def cells() -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Every cell: its key, and the function that measures it."""
    for shape in SHAPES:
        name = shape.name
        for rows in ROWS if name == "8B" else ROWS[:6]:
            for product, *rest in layer_products(shape):
                yield f"product {name} {product} {rows}", partial(one, product_row, shape, product, *rest, rows)
                for kind in ("int4", "fp8") if product != "head" else ():
                    cell = partial(one, quantized_row, shape, kind, product, *rest, rows)
                    yield f"product {name} {kind} {product} {rows}", cell
        for rows in (1, 8, 16):
            yield f"rotated {name} {rows}", partial(one, rotated_row, shape, rows)
        for batch in (1, 8, 32, 128, 256):
            yield f"decode {name} {batch}", partial(one, decode_row, shape, f"{batch} x 2100", [2100] * batch)
        for stored, batches in ((kv_pages.FP8, (1, 8, 32, 128)), (kv_pages.INT8, (32,))):
            kind = "fp8" if stored == kv_pages.FP8 else "int8"
            for batch in batches:
                contexts, title = [2100] * batch, f"{kind} {batch} x 2100"
                yield f"decode {kind} {name} {batch}", partial(one, decode_row, shape, title, contexts, 1, stored)
        for batch in (32, 256):
            title, contexts = f"{batch} x 2000, 1792 shared", [2000] * batch
            yield f"decode {name} shared {batch}", partial(one, decode_row, shape, title, contexts, 1, DTYPE, 1792)
        skewed = [31 * 512] + [2048] * 31 + [512] * 32
        even = [sum(skewed) // 64] * 64
        for kind, contexts in (("1 x 32768", [32768]), ("skewed 64", skewed), ("even 64", even)):
            yield f"decode {name} {kind}", partial(one, decode_row, shape, kind, contexts)
        yield f"verify {name}", partial(one, decode_row, shape, "32 x 2100, 5 tokens", [2100] * 32, 5)
        for tokens in (1950, 2048, 8192):
            yield f"prefill {name} {tokens}", partial(one, prefill_row, shape, tokens, 16)
        yield f"prefill {name} 2048 P=128", partial(one, prefill_row, shape, 2048, 128)
        yield f"chunk {name}", partial(one, chunk_row, shape, 512, 8192)
        for stored in (DTYPE, kv_pages.FP8):
            kind = "fp8 " if stored == kv_pages.FP8 else ""
            yield f"mixed {kind}{name}", partial(one, chunk_row, shape, 512, 8192, 32, stored)
        for tokens, context in ((2048, 2048), (8192, 8192), (512, 8192)):
            yield (
                f"prefill fp8 {name} {tokens} {context}",
                partial(one, chunk_row, shape, tokens, context, 0, kv_pages.FP8),
            )
        for tokens in (1, 64, 2048):
            yield f"layer {name} {tokens}", partial(layer_rows, shape, tokens)
        yield f"blocks {name}", partial(one, blocks_row, shape, 128)
        for rows in (1, 64, 2048):
            yield f"invariant {name} {rows}", partial(one, invariant_row, shape, rows)
    kinds: dict[str, tuple[float, int, float, float]] = {
        "greedy": (0, 0, 1, 0), "temperature": (0.8, 0, 1, 0), "min-p": (0.8, 0, 1, 0.05), "top-p": (0.8, 0, 0.9, 0),
        "top-k": (0.8, 50, 1, 0),
    }  # fmt: skip
    for batch in (1, 32, 256):
        for kind, settings in kinds.items():
            yield f"sample {kind} {batch}", partial(one, sampling_row, batch, kind, *settings)


def one(measure: Callable[..., Row], *arguments: Any) -> list[Row]:
    """A cell of one row."""
    return [measure(*arguments)]


def table(rows: list[Row], roof: dict[str, float]) -> str:
    """Markdown: a line for each row."""
    lines = [
        "| kernel | us | GB/s | TFLOP/s | share of floor | others |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        others = ", ".join(f"{name} {us:.1f} us ({us / row.microseconds:.2f}x)" for name, us in row.against.items())
        speed = row.bytes / row.microseconds / 1e3
        lines.append(
            f"| {row.name} | {row.microseconds:.1f} | {speed:,.0f} | {row.flop / row.microseconds / 1e6:.1f} "
            f"| {row.share(roof):.0%} | {row.note or others} |"
        )
    return "\n".join(lines)


def page(machine: str, roof: dict[str, float], rows: list[Row]) -> str:
    """The table as Markdown, with machine and ceilings."""
    head = ", ".join(f"{name} {value / 1e12:.2f} T/s" for name, value in roof.items())
    text = f"# Kernels\n\n{machine}. Ceilings of this run: {head}.\n\n"
    text += (
        "Linear layers include fused operations (residual, gate, rounding to fp8); others are the product alone.\n\n"
    )
    return text + table(rows, roof) + "\n"


def machine() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, random data"


def main() -> None:
    """Measure the cells that are missing, then write the results and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", help="only cells with these keys, such as '*sample*'; *, ? match")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    arguments = parser.parse_args()
    need_gpu()
    path = arguments.out / "kernels.json"
    saved = json.loads(path.read_text()) if path.exists() and not arguments.fresh else {}
    begin = time.monotonic()
    roof = ceilings()  # always of this run
    print(machine(), {name: f"{value / 1e12:.2f} T/s" for name, value in roof.items()}, flush=True)
    done: dict[str, list[Row]] = {key: [Row(**row) for row in rows] for key, rows in saved.get("cells", {}).items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for key, measure in cells():
        if key in done or not selected(key, arguments.only):
            continue
        try:
            done[key] = measure()
        except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as bad:  # A bad row is a row, too.
            done[key] = [Row(key, float("inf"), 0, 0, note=str(bad).splitlines()[0][:120])]
        torch.cuda.empty_cache()
        print("\n".join(table(done[key], roof).splitlines()[2:]), flush=True)
        state = {"machine": machine(), "ceilings": roof, "cells": {k: [asdict(r) for r in v] for k, v in done.items()}}
        path.write_text(json.dumps(state, indent=1))
    rows = [row for key, _ in cells() if key in done for row in done[key]]
    (arguments.out / "kernels.md").write_text(page(machine(), roof, rows))
    print(f"{len(rows)} rows, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
