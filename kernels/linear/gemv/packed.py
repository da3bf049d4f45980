"""Chooses program shapes for, and launches, the Hopper kernel for one row of x or a few and packed weights.

M rows, N outputs, K inputs; the kernel is in `kernels.linear.gemv.kernel`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.device import processors
from kernels.linear.gemv.kernel import gemv_kernel
from kernels.linear.gluon_common import NO_EXPERTS, NO_POOL, descriptor
from kernels.linear.packed import CHUNK, PackedWeight

WARPS = 8
"""Warps of most programs that multiply; two more load."""
MULTIPROCESSORS = 132
"""Of an H200."""


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
    warps: int = WARPS
    """Warps that multiply."""


ONE_ROUND = range(2 * MULTIPROCESSORS + 1, 3 * MULTIPROCESSORS + 1)
"""Numbers of tiles that three programs per multiprocessor compute in one round and two do not."""
LONG_INPUTS = {0: range(8192, 16385), CHUNK: range(8192, 14337)}
"""Inputs per scale (0: all) -> numbers of inputs that need more loads in flight, and for which they fit twice."""
FEWEST_INPUTS_OF_MANY_TILES = 4096
"""With fewer inputs, and more tiles than one round computes, `packed_hopper_kernel` multiplies several rows faster."""
MAX_INPUTS = {2: 28672, 3: 11264}
"""Programs per multiprocessor -> the most inputs, of all rows, for which x fits into shared memory that many times."""
MAX_INPUTS_OF_FOUR_BITS = 16384
"""With more inputs, of all rows, `packed_hopper_kernel` multiplies several rows by 4-bit weights faster."""
MAX_ROWS = 8
"""Tensor cores multiply as many rows at a time."""


def shape_for(weight: PackedWeight, rows: int) -> Shape | None:
    """The shape for `rows` rows, or None where another kernel serves. Measured on one H200."""
    n, k = weight.shape
    tiles, inputs = n // 16, block_of(rows) * k
    if rows > MAX_ROWS or weight.group not in (0, CHUNK) or n % 16 or k % (WARPS * CHUNK) or inputs > MAX_INPUTS[2]:
        return None
    four_bits = weight.kind == "int4"
    many_tiles, many_inputs = tiles >= ONE_ROUND.stop, inputs > MAX_INPUTS_OF_FOUR_BITS
    if rows > 1 and (many_tiles or many_inputs if four_bits else many_tiles and k < FEWEST_INPUTS_OF_MANY_TILES):
        return None
    if four_bits:
        return _shape_of_four_bits(weight, rows, tiles, inputs)
    if k >= LONG_INPUTS[0].start:
        return Shape(WARPS, 5 if rows == 1 and k in LONG_INPUTS[weight.group] else 3)
    # One round leaves room for the next kernel's programs; more rounds need more loads in flight.
    if tiles < ONE_ROUND.stop and inputs <= MAX_INPUTS[3]:
        return Shape(WARPS, 2, 3, 56)
    return Shape(WARPS, 4 if inputs < LONG_INPUTS[0].start else 3)


def _shape_of_four_bits(weight: PackedWeight, rows: int, tiles: int, inputs: int) -> Shape:
    chunks = WARPS if weight.chunks % (2 * WARPS) else 2 * WARPS
    stages = 3 * 2 * WARPS // chunks
    if rows == 1 and tiles <= MULTIPROCESSORS:
        return Shape(chunks, stages, 1, 96)
    if rows == 1 and _by_four_warps(weight):
        return Shape(chunks, 2 if chunks == 2 * WARPS else 3, 2, 120, WARPS // 2)
    return Shape(chunks, stages, 3, 56) if tiles in ONE_ROUND and inputs <= MAX_INPUTS[3] else Shape(chunks, stages)


def _by_four_warps(weight: PackedWeight) -> bool:
    """Whether four warps can share a load: four chunks of float32 scales are not a slice of it that can be read."""
    return weight.group == 0 or weight.scale.itemsize < 4


def block_of(rows: int) -> int:
    """ROWS of the kernel."""
    return 1 << (rows - 1).bit_length()


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    shape: Shape, pool: dict[str, Any] = NO_POOL,
) -> None:  # fmt: skip
    """As `packed_gemm.linear_packed` for up to MAX_ROWS rows; with `pool` as `packed_hopper.rotated_qkv`."""
    grid, arguments = launch(x, weight, bias, residual, gated, out, shape, processors(x.device), pool)
    gemv_kernel[grid](**arguments, launch_pdl=True)


def launch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    shape: Shape, processors: int, pool: dict[str, Any] = NO_POOL,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid and the arguments of `gemv_kernel`."""
    tiles = weight.shape[0] // 16
    return _launch(x, weight, tiles, 1, bias, residual, gated, out, shape, processors, pool, NO_EXPERTS)


def experts_shape_for(weight: PackedWeight, gated: bool, chosen: int) -> Shape | None:
    """The shape for a row of x and the weights of experts [E, ...], or None where another kernel serves."""
    n, k = weight.shape
    inputs = k if gated else k * chosen
    fits = weight.group in (0, CHUNK) and weight.zero is None and weight.order is None and chosen in (1, 2, 4, 8)
    if not fits or n % 128 or inputs > MAX_INPUTS[2]:
        return None
    boxes = 1 if gated else chosen
    many = (2 * WARPS, WARPS) if weight.kind == "int4" else (WARPS,)
    chunks = next((each for each in many if k % (each // boxes * CHUNK) == 0), None)
    if chunks is None or (weight.group and chunks // boxes * 8 * weight.scale.itemsize % 128):
        return None  # A box of scales would not be aligned for the copy engine.
    if boxes > 1 and not weight.group and chunks != WARPS:
        return None  # A warp has the scale of one expert, so it may multiply one chunk of a step only.
    if weight.kind == "int4":
        four = chunks == 2 * WARPS and _by_four_warps(weight)
        return Shape(chunks, 2, 2, 120, WARPS // 2) if four else Shape(chunks, 3)
    stages = 2 if gated and k <= 2048 else 4
    return Shape(chunks, min(stages, ((112 << 10) - 2 * inputs) // (chunks * 16 * 130)))


def experts_up(x: Tensor, weight: PackedWeight, logits: Tensor, chosen: int, normalized: bool, shape: Shape) -> Tensor:
    """As `dense_hopper.experts_up`; weight: of all experts."""
    out = torch.empty(1, chosen * weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    grid, arguments = launch_experts(x, weight, None, out, logits, chosen, normalized, shape, processors(x.device))
    gemv_kernel[grid](**arguments, launch_pdl=True)
    return out


def experts_down(residual: Tensor, x: Tensor, weight: PackedWeight, logits: Tensor, chosen: int, shape: Shape) -> None:
    """As `dense_hopper.experts_down`; weight: of all experts."""
    grid, arguments = launch_experts(x, weight, residual, residual, logits, chosen, True, shape, processors(x.device))
    gemv_kernel[grid](**arguments, launch_pdl=True)


def launch_experts(
    x: Tensor, weight: PackedWeight, residual: Tensor | None, out: Tensor, logits: Tensor, chosen: int,
    normalized: bool, shape: Shape, processors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid and the arguments of `gemv_kernel` for experts; without a residual the product is gated."""
    gated = residual is None
    each = weight.shape[0] // 16
    tiles, boxes = (each * chosen, 1) if gated else (each, chosen)
    experts = {
        "logits": logits, "each": each, "EXPERTS": logits.shape[1], "CHOSEN": chosen, "NORMALIZED": normalized
    }  # fmt: skip
    return _launch(x, weight, tiles, boxes, None, residual, gated, out, shape, processors, NO_POOL, experts)


def _launch(
    x: Tensor, weight: PackedWeight, tiles: int, boxes: int, bias: Tensor | None, residual: Tensor | None, gated: bool,
    out: Tensor, shape: Shape, processors: int, pool: dict[str, Any], listed: dict[str, Any],
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """boxes: experts whose products are one sum."""
    rows, n = len(x), weight.shape[0]
    box = shape.chunks // boxes
    groups = weight.scale.shape[-2]
    if weight.kind == "int4":
        packed = descriptor(weight.packed.view(-1, 32, 32), box, 4, 32)
    else:
        packed = descriptor(weight.packed.view(-1, weight.chunks, 32).transpose(0, 1), box, 8, 32)
    arguments = {
        "x": descriptor(x.view(rows, -1, 64).transpose(0, 1), 2 * box, block_of(rows), 64), "packed": packed,
        "scales": descriptor(weight.scale.view(-1, 64), box, 8) if weight.group else weight.scale,
        "zeros": weight.zero, "bias": bias, "residual": residual, "out": out, "M": rows, "N": n // 2 if gated else n,
        "C": weight.chunks, "groups": groups, "tiles": tiles, "KIND": weight.kind,
        "GROUP": weight.group, "GATED": gated, "HEAD": 0 if pool["kv"] is None else pool["kv"].shape[-1],
        "WARPS": shape.warps, "STEPS": weight.chunks // box, "BOXES": boxes, "STAGES": shape.stages,
        "num_warps": shape.warps, "maxnreg": shape.max_registers, **pool, **listed,
    }  # fmt: skip
    return (min(tiles, processors * shape.per_sm),), arguments
