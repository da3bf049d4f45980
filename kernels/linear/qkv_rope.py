"""Fuses the projection of queries, keys and values, their rotation and the write to the KV pool, for few rows.

    M rows of x    K columns of x    H query heads    G key/value heads    D head dimension    P tokens per block

A program computes both halves of some pairs of a head, so that it can rotate them in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options
from kernels.linear import dense_hopper
from kernels.linear.dense import multiply
from kernels.linear.dense_hopper import Shape
from kernels.linear.gemv import dense as dense_gemv
from kernels.linear.gemv import packed as packed_gemv
from kernels.linear.split_k import Tile, join, workspace
from kernels.operands import Norm


@triton.jit(do_not_specialize=["M"])
def qkv_kernel(
    x,  # [M, K], rows x_stride apart
    w,  # [(H + 2G) * D, K]
    bias,  # [(H + 2G) * D] or None
    cos,  # [positions, D], the halves alike
    sin,  # [positions, D], the first half negated
    positions,  # int64 [M]
    kv,  # [blocks * P, 2G, D]
    slot_mapping,  # int64 [M]: block * P + offset; a negative place is not written
    out,  # [M, H, D]: the queries
    parts,  # float32 [2, SPLIT, M, N]
    arrived,  # int32 [cdiv(N, BLOCK_N)], zero between launches
    M, K, x_stride, H, G,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, split): BLOCK_N of the N = (H + 2G) * HALF pairs of numbers, a SPLIT-th of the columns of W."""
    tile, split = tl.program_id(0), tl.program_id(1)
    N = (H + 2 * G) * HALF
    pairs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    here = pairs < N
    head, lane = pairs // HALF, pairs % HALF
    first = head * (2 * HALF) + lane
    rows = tl.arange(0, BLOCK_M)
    some = rows < M
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    low, high = split * span, tl.minimum(split * span + span, K)
    left, right = multiply(
        x, w, first, HALF, here, low, high, rows, M, K, x_stride, BLOCK_K, True, False, STAGES, AHEAD, PDL
    )
    # Angles are loaded while the splits are summed.
    valid = here[:, None] & some[None, :]
    angle = tl.load(positions + rows, mask=some, other=0)[None, :] * (2 * HALF) + lane[:, None]
    turned = valid & (head < H + G)[:, None]
    cosine = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    place = tl.load(slot_mapping + rows, mask=some, other=-1)[None, :]
    target = rows[None, :] * N + pairs[:, None]
    last, left, right = join(left, right, parts, arrived, tile, split, target, valid, M * N, SPLIT, True)
    if last:
        if bias is not None:
            left += tl.load(bias + first, mask=here, other=0.0).to(tl.float32)[:, None]
            right += tl.load(bias + first + HALF, mask=here, other=0.0).to(tl.float32)[:, None]
        new_left = (left * cosine + right * sine).to(out.dtype.element_ty)
        new_right = (right * cosine - left * sine).to(out.dtype.element_ty)
        asking = valid & (head < H)[:, None]
        query = out + rows[None, :] * (H * 2 * HALF) + first[:, None]
        tl.store(query, new_left, mask=asking)
        tl.store(query + HALF, new_right, mask=asking)
        written = valid & (head >= H)[:, None] & (place >= 0)
        page = kv + place * (4 * G * HALF) + (first - H * 2 * HALF)[:, None]
        tl.store(page, new_left, mask=written)
        tl.store(page + HALF, new_right, mask=written)


def tile_for(x: Tensor, outputs: int, dim: int, normed: bool = False) -> Tile | Shape | packed_gemv.Shape | None:
    """The tile for x [M, K] and this head dimension, or None where two kernels are as fast. outputs: of the weight.
    normed: queries and keys have norms. Measured on one H200."""
    if x.dtype == torch.float32:
        return None
    alone = len(x) == 1 and not normed and dim in (64, 128) and dense_hopper.serves(x)
    if alone and (shape := dense_gemv.shape_for(outputs, x.shape[1], False)):
        return shape
    wide = dense_hopper.rotated_shape_for(len(x), dim) if dense_hopper.serves(x) else None
    if wide is not None or len(x) > 16:
        return wide
    return Tile(64, 128, 4, 3) if dim <= 64 else Tile(32, 128, 4, 4)


def rotated_qkv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, positions_M: Tensor, kv_NP2GD: Tensor,
    slot_mapping_M: Tensor, heads: int, tile: Tile | Shape | packed_gemv.Shape, qk_norm: Norm | None = None,
) -> Tensor:  # fmt: skip
    """x @ weight.T + bias, rotated; keys and values go to the pool -> the queries [M, H, D].

    x [M, K], weight [(H + 2G) * D, K]. cos, sin: whole tables whose halves are equal; the pool has the model's dtype;
    the rest as in `rope_kv.rope_and_store`.
    """
    if isinstance(tile, Shape):
        return dense_hopper.rotated_qkv(
            x, weight, bias, cos, sin, positions_M, kv_NP2GD, slot_mapping_M, heads, tile, qk_norm
        )
    assert qk_norm is None
    if isinstance(tile, packed_gemv.Shape):
        return dense_gemv.rotated_qkv(
            x, weight, bias, cos, sin, positions_M, kv_NP2GD, slot_mapping_M, heads, tile
        )  # fmt: skip
    (rows, k), (kv_heads, dim) = x.shape, kv_NP2GD.shape[3:]
    half = dim // 2
    pairs = (heads + 2 * kv_heads) * half
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    space = workspace(x.device, 2 * tile.split * rows * pairs if tile.split > 1 else 0)
    qkv_kernel[(triton.cdiv(pairs, tile.n), tile.split)](
        x, weight, bias, cos, sin, positions_M, kv_NP2GD, slot_mapping_M, out, space.parts, space.arrived, rows, k,
        x.stride(0), heads, kv_heads, HALF=half, BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile.n,
        BLOCK_K=tile.k, SPLIT=tile.split, STAGES=tile.stages_on(x.device), AHEAD=tile.ahead, num_warps=tile.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
