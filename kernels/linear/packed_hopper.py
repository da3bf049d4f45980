"""Chooses program shapes for, and launches, the Hopper kernels for packed weights.

M rows of x, N outputs, K inputs, as in `kernels.linear.packed_gemm`. The kernel for few rows is in
`kernels.linear.packed_hopper_kernel`; many rows have one of their own, and up to eight rows where it is faster.
"""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from kernels.device import is_hopper, processors
from kernels.linear import packed_prefill
from kernels.linear.gemv import packed as packed_gemv
from kernels.linear.gluon_common import NO_POOL, descriptor, pool_arguments
from kernels.linear.packed import PackedWeight
from kernels.linear.packed_hopper_kernel import packed_hopper_kernel
from kernels.linear.split_k import workspace
from kernels.quantized_weights import FP8

GROUPS = 2
"""Warpgroups of a program that multiply, each 64 rows of W."""
MAX_8BIT_ROWS = 512
"""For more rows it is faster to dequantize an 8-bit weight and use cuBLAS."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the programs of `packed_hopper_kernel`."""

    block_m: int
    stages: int
    registers: int = 240
    """Registers of a thread that multiplies."""
    min_chunks: int = 4
    """The fewest chunks of 128 inputs per program."""
    per_sm: int = 1
    """Programs per multiprocessor."""
    max_registers: int | None = None
    """Registers per thread at launch, before the warpgroups redistribute them; None: as many as one program can
    have."""


AnyShape = Shape | packed_prefill.Shape | packed_gemv.Shape
"""The type of a shape selects the kernel."""


def shape_for(weight: PackedWeight, rows: int, gated: bool, rounded: bool = False) -> AnyShape | None:
    """The shape of programs for x [rows, K], or None where another kernel is faster. Measured on one H200.

    rounded: x is fp8, and so is the weight.
    """
    n, k = weight.shape
    if rounded:
        return _rounded_shape(rows, n, k)
    if few := packed_gemv.shape_for(weight, rows):
        return few
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
"""Block of rows -> stages with 4-bit and with 8-bit weights: as many as two programs' warps can multiply in time. More
loads in flight would slow the previous kernel down."""


def _rounded_shape(rows: int, n: int, k: int) -> Shape | None:
    """The shape for fp8 rows; None where cuBLAS is faster: more rows, many outputs."""
    if rows <= 64:
        return Shape(max(16, triton.next_power_of_2(rows)), 8)
    return Shape(128, 6) if rows <= 128 and n <= k else None


def rotated_shape_for(weight: PackedWeight, rows: int, dim: int) -> Shape | packed_gemv.Shape | None:
    """The shape for the fused projection to queries, keys and values with this head dimension, or None."""
    if rows > 64 or weight.order is not None:
        return None
    shape = shape_for(weight, rows, False)
    dims = (64, 128) if isinstance(shape, packed_gemv.Shape) else (128,)
    return None if isinstance(shape, packed_prefill.Shape) or dim not in dims else shape


def serves(x: Tensor) -> bool:
    """Whether the device is a Hopper and the copy engine can read these rows (16-byte alignment)."""
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
    """As `packed_gemm.linear_packed`, of at least one row. x_scales: float32 [M, 1] if x comes from
    `fp8.round_rows`."""
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
    """As `qkv_rope.rotated_qkv`, for a head dimension that has a shape, and a pool in the model's dtype or in fp8
    without scales."""
    out = x.new_empty(len(x), heads, kv_NP2GD.shape[4])
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
    """The grid and the arguments of `packed_hopper_kernel`."""
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
