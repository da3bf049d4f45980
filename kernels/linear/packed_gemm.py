"""Linear layers of few rows with packed 4-bit or 8-bit weights, y = x W^T, bound by reading W once.

Weights are converted to 16-bit floats in the registers from which tensor cores read them; x is not rounded. Bias,
residual and gate are fused as in `kernels.linear.dense`.

    M rows of x    N outputs    K inputs    T tiles of 64 outputs    C chunks of 128 inputs
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import silu_and_mul
from kernels.dependent_launch import launch_options, prefetch, wait
from kernels.device import has_asm
from kernels.linear.packed import CHUNK, PackedWeight, minus_zero, numbers, packed_rows
from kernels.linear.split_k import Tile, finish, workspace


@triton.jit
def add_product(
    total,  # float32 [BLOCK_N, BLOCK_M]
    a,  # words of a chunk, int32 [BLOCK_N, W]
    b,  # a part of that chunk's columns of x, [128 / PARTS, BLOCK_M]
    scales, zeros,
    place,  # [BLOCK_N]: where the rows' first scales are
    column,  # the part's first
    minus,  # as `numbers` takes it, where there are no zeros
    PART: tl.constexpr, PARTS: tl.constexpr, half: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """total + W x; scaled here unless all inputs share a scale."""
    if GROUP == 0:
        total = tl.dot(numbers(a, PART, PARTS, minus, half, KIND, ASM), b, total)
    else:
        group = column // GROUP * 64
        scale = tl.load(scales + place + group).to(tl.float32)
        if zeros is not None:
            minus = tl.broadcast_to(minus_zero(zeros, place + group, half), a.shape)
        total += tl.dot(numbers(a, PART, PARTS, minus, half, KIND, ASM), b) * scale[:, None]
    return total


@triton.jit(do_not_specialize=["M"])
def packed_gemm_kernel(
    x,  # [M, K], rows x_stride apart
    packed,  # int32: `Words.packed`; GATED: of [2N, K], the gates and then the ups
    scales,  # [T, groups, 64]
    zeros,  # uint8 [T, groups, 64] or None
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    parts,  # float32 [2 or 1, SPLIT, M, N]
    arrived,  # int32 [cdiv(N, BLOCK_N)], zero between launches
    M, N, K, C, groups, x_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    SPLIT: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, split) multiplies BLOCK_N rows of W, a SPLIT-th of their chunks, with all rows of x."""
    tile, split = tl.program_id(0), tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    span = tl.cdiv(tl.cdiv(C, STEP), SPLIT) * STEP
    low, high = split * span, tl.minimum(split * span + span, C)
    PARTS: tl.constexpr = 128 // GROUP if GROUP % 128 else 1
    SIZE: tl.constexpr = 1024 if KIND == "int4" else 32  # words between a row's chunks
    W: tl.constexpr = 16 if KIND == "int4" else 32
    gate = tl.minimum(columns, N - 1)
    other = gate + N
    lane = tl.arange(0, W)[None, :]
    weights, ups = (
        packed_rows(packed, gate, C, KIND)[:, None] + lane,
        packed_rows(packed, other, C, KIND)[:, None] + lane,
    )
    place, up_place = gate // 64 * groups * 64 + gate % 64, other // 64 * groups * 64 + other % 64
    if PDL and AHEAD > 0:
        if GROUP > 0:  # all scales: waiting for one takes longer than the computation
            lines = tl.minimum(low * 128 // GROUP * 64 + tl.arange(0, 64) * 64, groups * 64 - 1)
            prefetch(scales + tile * BLOCK_N // 64 * groups * 64 + lines)
        ahead = tl.minimum(low + tl.arange(0, AHEAD), C - 1)[None, :] * SIZE
        prefetch(packed_rows(packed, gate, C, KIND)[:, None] + ahead)
        if GATED:
            prefetch(packed_rows(packed, other, C, KIND)[:, None] + ahead)
    wait(PDL)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, 128 // PARTS)
    inputs = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    half: tl.constexpr = x.dtype.element_ty
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    minus = tl.broadcast_to(minus_zero(None, place, half), [BLOCK_N, W])
    for first in tl.range(low, high, STEP, num_stages=STAGES):
        for step in tl.static_range(STEP):
            chunk = tl.minimum(first + step, C - 1)
            a = tl.load(weights + chunk * SIZE, eviction_policy="evict_first")
            c = a
            if GATED:
                c = tl.load(ups + chunk * SIZE, eviction_policy="evict_first")
            for part in tl.static_range(PARTS):
                column = chunk * 128 + part * (128 // PARTS)
                mask = (rows < M)[:, None]
                if STEP > 1:
                    mask = mask & (first + step < high)
                if not EVEN:
                    mask = mask & (column + inner < K)[None, :]
                b = tl.trans(tl.load(inputs + column, mask=mask, other=0.0))
                product = add_product(
                    product, a, b, scales, zeros, place, column, minus, part, PARTS, half, KIND, GROUP, ASM
                )
                if GATED:
                    up = add_product(
                        up, c, b, scales, zeros, up_place, column, minus, part, PARTS, half, KIND, GROUP, ASM
                    )
    if GROUP == 0:
        product *= tl.load(scales + place).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales + up_place).to(tl.float32)[:, None]
    counter = tl.program_id(2) * tl.num_programs(0) + tile
    finish(product, up, bias, residual, out, parts, arrived, counter, split, columns, rows, M, N, SPLIT, GATED)


MAX_BLOCK_M, MAX_ROWS = 128, 256
"""Rows of x per program, and per product: the weights are converted to floats again for each MAX_BLOCK_M rows."""


def serves(x: Tensor, weight: PackedWeight, gated: bool) -> bool:
    """Whether `linear_packed` is faster for these rows than dequantizing the weight for cuBLAS."""
    if len(x) <= MAX_ROWS:
        return True
    hopper = hopper_for(x)
    return hopper is not None and hopper.shape_for(weight, len(x), gated) is not None


def hopper_for(x: Tensor) -> ModuleType | None:
    """`kernels.linear.packed_hopper` if it supports these rows on this device, else None."""
    if not launch_options(x.device)["PDL"]:
        return None
    from kernels.linear import packed_hopper

    return packed_hopper if packed_hopper.serves(x) else None


def tile_for(kind: str, rows: int, n: int, k: int, gated: bool) -> Tile:
    """The tile for x [rows, k] times W [n, k] (gated: two such W). Measured on one H200."""
    chunks = triton.cdiv(k, CHUNK)
    if rows > 64:
        tiles = triton.cdiv(n, 128) * triton.cdiv(rows, MAX_BLOCK_M)
        return Tile(128, CHUNK, _splits(tiles, 128, min(4, chunks)), 3, 8, 1)
    tiles = triton.cdiv(n, 64)
    if kind == "int4":
        enough = 200 if rows > 32 else 400 if chunks < 64 else 800
        return Tile(64, CHUNK, _splits(tiles, enough, min(16, chunks)), 3, 4, 1)
    tiles *= 1 + gated
    if rows > 32:
        return Tile(64, CHUNK, _splits(tiles, 200, min(16, chunks)), 3, 4, 1)
    return Tile(64, 2 * CHUNK, _splits(tiles, 192, min(16, chunks // 2)), 4, 4, 1)


def _splits(tiles: int, enough: int, most: int) -> int:
    """The smallest power of two, up to `most`, for which tiles * split >= enough."""
    split = 1
    while tiles * split < enough and 2 * split <= most:
        split *= 2
    return split


def linear_packed(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """As `dense.linear`, for rows of a 16-bit dtype that `serves`; the tile is chosen unless given."""
    rows, k = x.shape
    assert k == weight.shape[1]
    assert not gated or (bias is None and residual is None)
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    hopper = None if tile else hopper_for(x)
    if hopper and (shape := hopper.shape_for(weight, rows, gated)):
        hopper.linear(x, weight, bias, residual, gated, out, shape)
        return out
    return _tiled(x, weight, bias, residual, gated, out, tile)


def _tiled(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
    tile: Tile | None,
) -> Tensor:
    """As `linear_packed` by `packed_gemm_kernel`, which runs on any device."""
    (rows, k), n = x.shape, out.shape[1]
    block = min(MAX_BLOCK_M, max(16, triton.next_power_of_2(rows)))
    if gated and block > 64:  # two accumulators would not fit into the registers
        return silu_and_mul(_tiled(x, weight, None, None, False, x.new_empty(rows, 2 * n), tile), out)
    tile = tile or tile_for(weight.kind, rows, n, k, gated)
    space = workspace(x.device, (1 + gated) * tile.split * rows * n if tile.split > 1 else 0)
    packed_gemm_kernel[(triton.cdiv(n, tile.n), tile.split, triton.cdiv(rows, block))](
        x, weight.packed, weight.scale, weight.zero, bias, residual, out, space.parts, space.arrived, rows, n, k,
        weight.chunks, weight.scale.shape[1], x.stride(0), KIND=weight.kind, GROUP=weight.group,
        BLOCK_M=block, BLOCK_N=tile.n, STEP=tile.k // CHUNK, SPLIT=tile.split,
        GATED=gated, EVEN=k % CHUNK == 0, STAGES=tile.stages_on(x.device), AHEAD=tile.ahead,
        ASM=has_asm(x.device), num_warps=tile.warps, **launch_options(x.device),
    )  # fmt: skip
    return out
