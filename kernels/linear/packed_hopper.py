"""Launches of the Hopper kernel for quantized weights: which shape of program serves which product, what it is told.

M rows of x, N outputs, K inputs, as in `kernels.linear.packed_gemm`; the kernel is
`kernels.linear.packed_hopper_kernel`.
"""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from kernels.device import is_hopper, processors
from kernels.linear import packed_gemv, packed_prefill
from kernels.linear.gluon_common import NO_POOL, descriptor, pool_arguments
from kernels.linear.packed import PackedWeight
from kernels.linear.packed_hopper_kernel import packed_hopper_kernel
from kernels.linear.split_k import workspace
from kernels.quantized_weights import FP8

GROUPS = 2
"""Warpgroups of a program that multiply, 64 rows of W each."""
MAX_8BIT_ROWS = 512
"""With more, a weight of eight bits is better dequantized once for the vendor's product."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a product's programs."""

    block_m: int
    stages: int
    registers: int = 240
    """Of a thread that multiplies."""
    min_chunks: int = 4
    """Chunks of 128 inputs that a program takes at least."""
    per_sm: int = 1
    """Programs that a multiprocessor holds."""
    max_registers: int | None = None
    """Of a thread before the warpgroups share them out; None: as many as one program can have."""


AnyShape = Shape | packed_prefill.Shape | packed_gemv.Shape
"""Each has a kernel of its own."""


def shape_for(weight: PackedWeight, rows: int, gated: bool, rounded: bool = False) -> AnyShape | None:
    """The shape of programs for x [rows, K], or None where another kernel is faster. Measured on one H200.

    rounded: x is fp8, and so is the weight.
    """
    n, k = weight.shape
    if rounded:
        return _rounded_shape(rows, n, k)
    if one := packed_gemv.shape_for(weight, rows):
        return one
    if weight.group % 128 or (gated and n % 128) or k % 8:
        return None
    octets = weight.kind != "int4"
    if rows > 64:
        if not octets:
            return packed_prefill.shape_for(rows, n, k)
        return Shape(128, 4) if rows <= MAX_8BIT_ROWS else None
    if rows > 32:
        return Shape(64, 5 if octets else 6)
    block = max(8, triton.next_power_of_2(rows))
    return Shape(block, STAGES[block][octets], 104, per_sm=2, max_registers=80)


STAGES = {8: (5, 3), 16: (4, 3), 32: (3, 4)}
"""With weights of four and of eight bits: as many as two programs' multiplying warps keep up with. What is fetched
ahead beyond that is in the way of the kernel before."""


def _rounded_shape(rows: int, n: int, k: int) -> Shape | None:
    """Of fp8 rows; the vendor's product is faster where more rows meet many outputs."""
    if rows <= 64:
        return Shape(max(16, triton.next_power_of_2(rows)), 8)
    return Shape(128, 6) if rows <= 128 and n <= k else None


def rotated_shape_for(weight: PackedWeight, rows: int, dim: int) -> Shape | packed_gemv.Shape | None:
    """The shape for queries, keys and values of so many rows and this head dimension, or None."""
    if dim != 128 or rows > 64 or weight.order is not None:
        return None
    shape = shape_for(weight, rows, False)
    return None if isinstance(shape, packed_prefill.Shape) else shape


def serves(x: Tensor) -> bool:
    """Whether the kernel can take these rows, on this device."""
    return (
        is_hopper(x.device)
        and len(x) > 0
        and x.itemsize <= 2
        and x.stride(0) * x.itemsize % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
    shape: AnyShape,
    x_scales: Tensor | None = None,
) -> Tensor:
    """`matmul_words.linear_packed` of at least one row. x_scales: float32 [M, 1], x is `fp8.round_rows`."""
    if isinstance(shape, packed_prefill.Shape):
        packed_prefill.linear(x, weight, bias, residual, gated, out, shape)
        return out
    if isinstance(shape, packed_gemv.Shape):
        packed_gemv.linear(x, weight, bias, residual, gated, out, shape)
        return out
    grid, arguments = launch(x, weight, bias, residual, gated, out, shape, x_scales, processors(x.device))
    packed_hopper_kernel[grid](**arguments, launch_pdl=True)
    return out


def rotated_qkv(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, cos: Tensor, sin: Tensor, positions_M: Tensor,
    kv_NP2GD: Tensor, slot_mapping_M: Tensor, heads: int, shape: Shape | packed_gemv.Shape,
) -> Tensor:  # fmt: skip
    """As `qkv.rotated_qkv`, of heads of 128 numbers, of a pool in the model's dtype or of fp8 that counts as it is."""
    out = x.new_empty(len(x), heads, 128)
    pool = pool_arguments(cos, sin, positions_M, kv_NP2GD, slot_mapping_M, heads)
    if isinstance(shape, packed_gemv.Shape):
        packed_gemv.linear(x, weight, bias, None, False, out, shape, pool)
        return out
    grid, arguments = launch(x, weight, bias, None, False, out, shape, None, processors(x.device), pool)
    packed_hopper_kernel[grid](**arguments, launch_pdl=True)
    return out


def launch(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
    shape: Shape,
    x_scales: Tensor | None,
    processors: int,
    pool: dict[str, Any] = NO_POOL,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the arguments of the kernel."""
    rows, n = x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]
    down = triton.cdiv(rows, shape.block_m)
    units = triton.cdiv(weight.shape[0], GROUPS * 64) * down * weight.chunks
    span = max(shape.min_chunks, triton.cdiv(units, processors * shape.per_sm))
    programs = triton.cdiv(units, span)
    space = workspace(x.device, programs * 2 * GROUPS * shape.block_m * 64)
    if x_scales is not None:
        packed = descriptor(weight.packed.view(FP8), 64, 128)
    elif weight.kind == "int4":
        packed = descriptor(weight.packed.view(-1, 32), 32, 32)
    else:
        packed = descriptor(weight.packed, 64, 32)
    arguments = {
        "x": descriptor(x, shape.block_m, 64 if x_scales is None else 128), "packed": packed,
        "scales": descriptor(weight.scale.view(-1), 64) if weight.group else weight.scale, "zeros": weight.zero,
        "x_scales": x_scales, "bias": bias, "residual": residual, "out": out, "parts": space.parts,
        "arrived": space.arrived, "M": rows, "N": n, "C": weight.chunks,
        "groups": weight.scale.shape[1], "span": span, "units": units, "down": down, "KIND": weight.kind,
        "GROUP": weight.group, "GATED": gated, "BLOCK_M": shape.block_m, "GROUPS": GROUPS,
        "STAGES": shape.stages, "REGISTERS": shape.registers, "num_warps": 4, "maxnreg": shape.max_registers, **pool,
    }  # fmt: skip
    return (programs,), arguments
