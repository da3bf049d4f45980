"""Chooses program shapes for, and launches, the Hopper kernel for one row of x and packed weights.

N outputs, K inputs; the kernel is in `kernels.linear.packed_gemv_kernel`.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.device import processors
from kernels.linear.gluon_common import NO_POOL, descriptor
from kernels.linear.packed import CHUNK, PackedWeight
from kernels.linear.packed_gemv_kernel import packed_gemv_kernel

WARPS = 8
"""Warps of a program that multiply; two more load."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the programs."""

    chunks: int
    """Chunks of 128 inputs per load."""
    stages: int
    """Loads that are in flight or being multiplied."""
    per_sm: int = 2
    """Programs per multiprocessor."""
    max_registers: int = 80
    """Registers per thread at launch, before the warps redistribute them."""


ONE_ROUND = range(2 * 132 + 1, 3 * 132 + 1)
"""Numbers of tiles that three programs per multiprocessor compute in one round and two do not."""
LONG_INPUTS = {0: range(8192, 16385), CHUNK: range(8192, 14337)}
"""Inputs per scale (0: all) -> numbers of inputs that need more loads in flight, and for which they fit twice."""
MAX_INPUTS = {2: 28672, 3: 11264}
"""Programs per multiprocessor -> the most inputs for which x fits into shared memory that many times."""


def shape_for(weight: PackedWeight, rows: int) -> Shape | None:
    """The shape for `rows` rows, or None where another kernel serves. Measured on one H200."""
    n, k = weight.shape
    if rows != 1 or weight.group not in (0, CHUNK) or n % 16 or k % (WARPS * CHUNK) or k > MAX_INPUTS[2]:
        return None
    if weight.kind != "int4":
        if k >= LONG_INPUTS[0].start:
            return Shape(WARPS, 5 if k in LONG_INPUTS[weight.group] else 3)
        # One round leaves room for the next kernel's programs; more rounds need more loads in flight.
        return Shape(WARPS, 2, 3, 56) if n // 16 < ONE_ROUND.stop else Shape(WARPS, 4)
    chunks = WARPS if weight.chunks % (2 * WARPS) else 2 * WARPS
    stages = 3 * 2 * WARPS // chunks
    return Shape(chunks, stages, 3, 56) if n // 16 in ONE_ROUND and k <= MAX_INPUTS[3] else Shape(chunks, stages)


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    shape: Shape, pool: dict[str, Any] = NO_POOL,
) -> None:  # fmt: skip
    """As `packed_gemm.linear_packed` for one row; with `pool` as `packed_hopper.rotated_qkv`."""
    grid, arguments = launch(x, weight, bias, residual, gated, out, shape, processors(x.device), pool)
    packed_gemv_kernel[grid](**arguments, launch_pdl=True)


def launch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    shape: Shape, processors: int, pool: dict[str, Any] = NO_POOL,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid and the arguments of `packed_gemv_kernel`."""
    rows, tiles = weight.shape[0], weight.shape[0] // 16
    if weight.kind == "int4":
        packed = descriptor(weight.packed.view(-1, 32, 32), shape.chunks, 4, 32)
    else:
        packed = descriptor(weight.packed.view(rows, -1, 32).transpose(0, 1), shape.chunks, 8, 32)
    arguments = {
        "x": descriptor(x.view(-1, 64), 2 * shape.chunks, 64), "packed": packed,
        "scales": descriptor(weight.scale.view(-1, 64), shape.chunks, 8) if weight.group else weight.scale,
        "zeros": weight.zero, "bias": bias, "residual": residual, "out": out, "N": rows // 2 if gated else rows,
        "C": weight.chunks, "groups": weight.scale.shape[1], "tiles": tiles, "KIND": weight.kind,
        "GROUP": weight.group, "GATED": gated, "WARPS": WARPS, "STEPS": weight.chunks // shape.chunks,
        "STAGES": shape.stages, "num_warps": WARPS, "maxnreg": shape.max_registers, **pool,
    }  # fmt: skip
    return (min(tiles, processors * shape.per_sm),), arguments
