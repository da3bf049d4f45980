"""Times tile shapes on one GPU and prints the best for each product shape: the tables in `kernels/` come from it.

    python -m bench.kernels.tune GROUP [--part I/N]

--part compiles the I-th of N parts of the configurations without timing: N processes fill the compile cache in
parallel.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import triton

from bench.kernels.cells import SHAPES
from bench.kernels.cells.attention import Pages, decode_seconds, prefill_flop, prefill_seconds
from bench.kernels.cells.linear import layer_products, random_packed
from bench.kernels.timing import DTYPE, copies, rand, timed
from kernels import kv_pages, sampling
from kernels.attention import Config
from kernels.linear import cublaslt, dense, fp8, packed_gemm, packed_hopper
from kernels.linear.packed import PackedWeight
from kernels.linear.split_k import Tile
from kernels.sampling.slot_settings import slot_settings
from report.machine import need_gpu

Result = TypeVar("Result")


def product_tiles() -> Iterator[Tile]:
    for n, k, stages, warps in (
        (32, 128, 6, 4), (32, 256, 4, 4), (64, 64, 6, 4), (64, 64, 8, 4), (64, 128, 4, 4), (64, 128, 6, 4),
        (128, 64, 5, 4),
    ):  # fmt: skip
        yield Tile(n, k, 1, stages, warps)


SPLITS, AHEAD = (1, 2, 3, 4, 6, 8), (4, 16, 32)


def tune_linear(part: tuple[int, int] | None) -> None:
    """The split-K kernel for each 16-bit product of a layer."""
    everything = list(itertools.product(product_tiles(), SPLITS, AHEAD))
    if part:
        trials = list(itertools.product((1, 32), everything, (False, True)))
        w, x = rand(8192, 4096), rand(64, 4096)
        for rows, (tile, split, ahead), gated in trials[part[0] :: part[1]]:
            try_(partial(dense.linear, x[:rows], w, gated=gated, tile=changed(tile, split, ahead)))
        return
    for shape in SHAPES:
        for name, n, k, gated, _ in layer_products(shape):
            weights = copies(partial(rand, 2 * n if gated else n, k))
            for rows in (1, 16, 32):
                x, out = rand(rows, k), torch.empty(rows, n, dtype=DTYPE, device="cuda")
                found = []
                for tile, split, ahead in everything:
                    programs = triton.cdiv(n, tile.n) * split
                    if (split > 1 and programs > 800) or programs < 100:
                        continue
                    trial = changed(tile, split, ahead)
                    launches = [partial(dense.linear, x, w, gated=gated, out=out, tile=trial) for w in weights]
                    seconds = try_(partial(timed, launches, 1.5, 3))
                    if seconds:
                        found.append((seconds, trial))
                plain = torch.empty(rows, weights[0].shape[0], dtype=x.dtype, device="cuda")
                cublas = timed([partial(torch.mm, x, w.t(), out=plain) for w in weights], 1.5, 3)
                size = weights[0].numel() * 2
                found.sort(key=lambda pair: pair[0])
                print(f"{shape.name} {name} M={rows}: cublas {cublas * 1e6:.1f} us {size / cublas / 1e12:.2f} TB/s")
                for seconds, t in found[:4]:
                    print(
                        f"    {seconds * 1e6:.1f} us {size / seconds / 1e12:.2f} TB/s n {t.n} k {t.k} split {t.split} "
                        f"stages {t.stages} warps {t.warps} ahead {t.ahead}",
                        flush=True,
                    )


def changed(tile: Tile, split: int, ahead: int) -> Tile:
    return Tile(tile.n, tile.k, split, tile.stages, tile.warps, ahead)


def packed_tiles(rows: int) -> Iterator[Tile]:
    shapes = [(64, 128, 4), (64, 128, 2), (32, 128, 2), (128, 128, 4), (64, 256, 4)]
    if rows > 16:
        shapes = [(64, 128, 4), (128, 128, 8)]
    for (n, k, warps), stages, split in itertools.product(
        shapes, (3,) if rows <= 16 else (3, 4), (1, 2, 4, 8, 16) if rows <= 64 else (1, 2, 4)
    ):
        yield Tile(n, k, split, stages, warps, 1)


PACKED_ROWS, KINDS = (1, 16, 64, 128, 256), ("int4", "fp8")


def packed_trials(kind: str, gated: bool, rows: int, tile: Tile) -> bool:
    """Whether this combination is timed."""
    return not (gated and tile.split > 4) and not (rows > 64 and gated) and not (rows > 8 and kind != "int4")


def tune_packed(part: tuple[int, int] | None) -> None:
    """The Triton kernel for packed weights, for each product of a layer."""
    if part:
        trials = [
            (kind, gated, rows, tile)
            for kind, gated, rows in itertools.product(KINDS, (False, True), PACKED_ROWS)
            for tile in packed_tiles(rows)
            if packed_trials(kind, gated, rows, tile)
        ]
        made = {kind: random_packed(kind, 8192, 4096) for kind in KINDS}
        x = rand(256, 4096)
        for kind, gated, rows, tile in trials[part[0] :: part[1]]:
            try_(partial(packed_gemm.linear_packed, x[:rows], made[kind], gated=gated, tile=tile))
        return
    for shape, kind in itertools.product(SHAPES[:1], KINDS):
        kinds = [(name, n, k, gated) for name, n, k, gated, _ in layer_products(shape) if name != "head"]
        for name, n, k, gated in [*kinds, ("gate-up alone", 2 * shape.ffn, shape.hidden, False)]:
            one = random_packed(kind, 2 * n if gated else n, k)
            weights = [one, *(random_packed(kind, *one.shape) for _ in range(min(63, (300 << 20) // one.nbytes)))]
            for rows in PACKED_ROWS:
                tune_product(f"{shape.name} {kind} {name}", kind, weights, n, gated, rows)


def tune_product(name: str, kind: str, weights: list[PackedWeight], n: int, gated: bool, rows: int) -> None:
    """Time one product with packed weights at one number of rows."""
    x, out = rand(rows, weights[0].shape[1]), torch.empty(rows, n, dtype=DTYPE, device="cuda")
    found = []
    for tile in packed_tiles(rows):
        programs = triton.cdiv(n, tile.n) * tile.split
        if (tile.split > 1 and programs > 1300) or programs < 30 or not packed_trials(kind, gated, rows, tile):
            continue
        if (1 + gated) * tile.split * rows * n > 8 << 20 and tile.split > 1:
            continue
        launches = [partial(packed_gemm.linear_packed, x, w, gated=gated, out=out, tile=tile) for w in weights]
        seconds = try_(partial(timed, launches, 1.0, 3))
        if seconds:
            found.append((seconds, tile))
    if not found:
        return
    found.sort(key=lambda pair: pair[0])
    print(f"{name} M={rows}: {weights[0].nbytes / found[0][0] / 1e12:.2f} TB/s", flush=True)
    for seconds, t in found[:3]:
        print(f"    {seconds * 1e6:.1f} us n {t.n} k {t.k} w {t.warps} split {t.split} stages {t.stages}", flush=True)


def hopper_shapes(rows: int) -> Iterator[packed_hopper.Shape]:
    block = max(8, min(128, triton.next_power_of_2(rows)))
    for stages, least in itertools.product((3, 4, 5, 6), (4, 8)):
        if block <= 32:
            yield packed_hopper.Shape(block, stages, 104, least, 2, 80)
        yield packed_hopper.Shape(block, stages, 240, least)


def tune_hopper(part: tuple[int, int] | None) -> None:
    """The Hopper kernel for packed weights, for each product of a layer, and for fp8 rows."""
    for kind, rounded, (name, n, k, gated, _) in itertools.product(KINDS, (False, True), layer_products(SHAPES[0])):
        if name == "head" or (rounded and kind == "int4"):
            continue
        outputs, gated = (2 * n, gated) if gated else (n, False)
        weights = [random_packed(kind, outputs, k) for _ in range(1 if part else 4)]
        for rows in (1, 16, 32, 64) if kind == "int4" else (1, 16, 32, 64, 128, 256, 512):
            x, scales = fp8.round_rows(rand(rows, k)) if rounded else (rand(rows, k), None)
            gate = gated and not rounded
            out = torch.empty(rows, n if gate else outputs, dtype=DTYPE, device="cuda")
            shapes = list(hopper_shapes(rows))
            for shape in shapes[part[0] :: part[1]] if part else shapes:
                launches = [partial(packed_hopper.linear, x, w, None, None, gate, out, shape, scales) for w in weights]
                if part:
                    try_(launches[0])
                elif seconds := try_(partial(timed, launches, 1.5, 3)):
                    print(f"{kind} rounded {rounded} {name} M={rows}: {seconds * 1e6:.1f} us {shape}", flush=True)


def tune_cublaslt(part: tuple[int, int] | None) -> None:
    """cuBLASLt's tiles for the 16-bit products of a layer with 65 to 256 rows, against torch's choice."""
    assert part is None, "cuBLAS compiles nothing"
    for shape, rows in itertools.product(SHAPES, (65, 96, 128, 192, 256)):
        for name, n, k, gated, _ in layer_products(shape):
            outputs = 2 * n if gated else n
            weights, x = copies(partial(rand, outputs, k)), rand(rows, k)
            out = torch.empty(rows, outputs, dtype=DTYPE, device="cuda")
            plain = timed([partial(torch.mm, x, w.t(), out=out) for w in weights], 1.5, 3)
            found = []
            for tile in cublaslt.tiles():
                if cublaslt.multiply(x, weights[0], None, out, tile):
                    launches = [partial(cublaslt.multiply, x, w, None, out, tile) for w in weights]
                    found.append((timed(launches, 1.5, 3), tile))
            found.sort(key=lambda pair: pair[0])
            chosen = cublaslt.tile_for(rows, outputs)
            print(f"{shape.name} {name} M={rows}: torch {plain * 1e6:.1f} us, chosen {chosen}")
            for seconds, tile in found[:3]:
                print(f"    {seconds * 1e6:.1f} us {tile}", flush=True)


def decode_configs() -> Iterator[Config]:
    for (keys, warps, stages), programs, least, merge in itertools.product(
        ((32, 2, 5), (64, 4, 5), (64, 2, 6), (128, 4, 3), (128, 4, 6), (128, 2, 6), (32, 1, 5), (32, 1, 7)),
        (264, 396, 528),
        (1, 2),
        (16, 64),
    ):
        for apart in (False, True):
            yield Config(keys, warps, stages, programs, least, split_by_head=apart, split_merge=merge)


def tune_decode(part: tuple[int, int] | None) -> None:
    """The split kernel of attention, for decode at several batch sizes."""
    for shape, stored in itertools.product(SHAPES, (DTYPE, kv_pages.FP8)):
        for contexts in ([2100], [2100] * 8, [2100] * 32, [2100] * 128, [32768]):
            if part and len(contexts) > 1:
                continue
            pages = Pages(shape, contexts, 16, stored)
            found = []
            configs = list(decode_configs())
            for config in configs[part[0] :: part[1]] if part else configs:
                seconds = try_(partial(decode_seconds, pages, 1, config))
                if seconds:
                    found.append((seconds, config))
            report(f"{shape.name} decode {stored} {len(contexts)} x {contexts[0]}", found, pages.bytes(), 0)
            del pages
            torch.cuda.empty_cache()


def prefill_configs() -> Iterator[Config]:
    for rows, keys, warps, stages in (
        (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5),
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 5), (128, 64, 4, 3), (128, 64, 4, 5), (128, 32, 8, 5),
        (256, 64, 8, 3), (64, 32, 4, 5),
    ):  # fmt: skip
        yield Config(tile_rows=rows, tile_keys=keys, tile_warps=warps, tile_stages=stages, hopper=False)


def tune_prefill(part: tuple[int, int] | None) -> None:
    """The tile kernel of attention, for a prompt in one chunk."""
    for shape in SHAPES:
        for tokens, block in ((2048, 16), (2048, 128), (8192, 16)):
            if part and tokens > 2048:
                continue
            found = []
            configs = list(prefill_configs())
            for config in configs[part[0] :: part[1]] if part else configs:
                seconds = try_(partial(prefill_seconds, shape, [tokens], [tokens], block, config=config))
                if seconds:
                    found.append((seconds, config))
            report(f"{shape.name} prefill {tokens} P={block}", found, 0, prefill_flop(shape, tokens, tokens))


def tune_sampling(part: tuple[int, int] | None) -> None:
    """Sampling of greedy rows and rows with temperature, at several batch sizes."""
    for rows, temperature in itertools.product((1, 32, 256), (0.0, 0.8)):
        state = slot_settings(rows, "cuda", SHAPES[0].vocab)
        state.temperature.fill_(temperature)
        logits = copies(partial(rand, rows, SHAPES[0].vocab, dtype=torch.float32))
        where, places = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
        shapes = list(itertools.product((512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)))
        for chunk, warps in shapes[part[0] :: part[1]] if part else shapes:
            step = partial(sampling.sample, settings=state, slots_S=where, positions_S=places, chunk=chunk, warps=warps)
            seconds = timed([partial(step, x) for x in logits])
            print(f"sample S={rows} T={temperature} chunk {chunk} warps {warps}: {seconds * 1e6:.1f} us", flush=True)


def try_(call: Callable[[], Result]) -> Result | None:
    """The call's result, or None if the configuration needs more shared memory or registers than there are."""
    try:
        return call()
    except triton.runtime.errors.OutOfResources:
        return None


def report(name: str, found: list[tuple[float, Config]], size: float, flop: float) -> None:
    found.sort(key=lambda pair: pair[0])
    for seconds, c in [*found[:4], *found[-1:]]:
        rate = f"{size / seconds / 1e12:.2f} TB/s" if size else f"{flop / seconds / 1e12:.0f} TFLOP/s"
        shape = (
            f"keys {c.split_keys} warps {c.split_warps} stages {c.split_stages} "
            f"programs {c.split_programs} least {c.split_min_tiles}"
            if size
            else f"rows {c.tile_rows} keys {c.tile_keys} warps {c.tile_warps} stages {c.tile_stages}"
        )
        print(f"{name}: {seconds * 1e6:.1f} us {rate} | {shape}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=["linear", "cublaslt", "packed", "hopper", "decode", "prefill", "sampling"])
    parser.add_argument("--part")
    arguments = parser.parse_args()
    need_gpu()
    groups = {
        "linear": tune_linear, "cublaslt": tune_cublaslt, "packed": tune_packed, "hopper": tune_hopper,
        "decode": tune_decode, "prefill": tune_prefill, "sampling": tune_sampling,
    }  # fmt: skip
    first, _, count = (arguments.part or "").partition("/")
    groups[arguments.group]((int(first), int(count)) if count else None)
