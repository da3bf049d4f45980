"""Chooses tiles for, distributes over programs and launches the Hopper kernel for many rows and packed 4-bit weights.

M rows of x, N outputs, C chunks of 128 inputs; the kernel is in `kernels.linear.packed_prefill_kernel`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton
from torch import Tensor

from kernels.device import processors, under_mps
from kernels.linear.gluon_common import descriptor
from kernels.linear.packed import CHUNK, PackedWeight
from kernels.linear.packed_prefill_kernel import packed_prefill_kernel
from kernels.linear.split_k import workspace


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the tiles."""

    block_m: int
    """Rows of x in one accumulator, a power of two."""
    stages: int
    """Panels of 64 columns of x that are in flight or being multiplied."""
    ring: int
    """Chunks of words that are in flight or being multiplied."""
    cost: float
    """Time of a tile relative to a WIDE one. Words are converted to floats again for each tile."""
    min_chunks: int
    """The shape is not used for products with fewer chunks: sharing tiles would take too long."""
    tail: int = 0
    """Rows of x in a second accumulator."""

    @property
    def rows(self) -> int:
        """Rows of x in a tile."""
        return self.block_m + self.tail


NARROW, MIDDLE = Shape(128, 10, 6, cost=0.62, min_chunks=0), Shape(128, 8, 3, cost=0.84, min_chunks=528, tail=64)
WIDE, TALL = Shape(256, 6, 3, cost=1.0, min_chunks=1536), Shape(256, 4, 6, cost=1.34, min_chunks=1584, tail=64)


@lru_cache(64)  # all layers of a step have the same shapes
def shape_for(rows: int, n: int, k: int) -> Shape:
    """The shape for x [rows, k] times W [n, k]: of those with enough chunks, the one with the least total time.
    Measured on one H200."""
    chunks = triton.cdiv(n, 128) * triton.cdiv(k, CHUNK)
    down = {shape: triton.cdiv(rows, shape.rows) for shape in (NARROW, MIDDLE, WIDE, TALL)}
    enough = [shape for shape in down if down[shape] * chunks >= shape.min_chunks]
    return min(enough, key=lambda shape: shape.cost * down[shape])


BAND = 8
"""Tiles of x that are combined with all rows of W before the next band begins: 132 programs read 8 tiles of x and 16 of
W at a time, so that x, four times as many bytes as the words, comes from the L2. Measured on one H200: 4 and 8 are
equal."""
SHARING = 6
"""Cost of sharing tiles for a program, in the time of chunks."""
UNEVEN = 4
"""Further cost if some programs have parts of two tiles: one program joins a tile, and programs read different columns
of x at a time."""


@lru_cache(64)
def share(tiles: int, chunks: int, processors: int) -> tuple[int, int]:
    """How many tiles are computed by one program each, and how many chunks of the other tiles each program computes."""
    rest = tiles % processors
    if rest == 0 or (processors - rest) * chunks <= SHARING * processors:
        return tiles, 1
    min_chunks, equal = triton.cdiv(chunks, processors // rest), triton.cdiv(rest * chunks, processors)
    even = next(span for span in range(min_chunks, chunks + 1) if chunks % span == 0)
    if even < chunks and even <= equal + UNEVEN:
        return tiles - rest, even
    if tiles > processors and 2 * rest <= processors:  # few parts per tile are faster than many
        rest += processors
    return tiles - rest, triton.cdiv(rest * chunks, processors)


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
    shape: Shape,
) -> None:
    """As `packed_gemm.linear_packed`, of at least one row."""
    grid, arguments = launch(x, weight, bias, residual, gated, out, shape, processors(x.device))
    packed_prefill_kernel[grid](**arguments, launch_pdl=True)


def launch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    shape: Shape, processors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid and the arguments of `packed_prefill_kernel`."""
    (rows, n), chunks = out.shape, weight.chunks
    down = triton.cdiv(rows, shape.rows)
    across = triton.cdiv(n, 64 if gated else 128)
    tiles = across * down
    # Programs that share a tile wait for one another.
    alone, span = (tiles, 1) if under_mps() else share(tiles, chunks, processors)
    units = (tiles - alone) * chunks
    programs = processors if tiles >= processors else triton.cdiv(units, span) if units else tiles
    space = workspace(x.device, programs * 2 * shape.rows * 64)
    arguments = {
        "x": descriptor(x, shape.block_m, 64), "x_tail": descriptor(x, shape.tail, 64) if shape.tail else None,
        "packed": descriptor(weight.packed.view(-1, 16), 64, 16),
        "scales": weight.scale, "zeros": weight.zero, "bias": bias, "residual": residual, "out": out,
        "parts": space.parts, "arrived": space.arrived, "M": rows, "N": n, "C": chunks,
        "groups": weight.scale.shape[1], "alone": alone, "span": span, "units": units, "down": down,
        "band": min(BAND, down), "across": across,
        "GROUP": weight.group, "GATED": gated, "BLOCK_M": shape.block_m, "STAGES": shape.stages, "RING": shape.ring,
        "num_warps": 4,
    }  # fmt: skip
    return (programs,), arguments
