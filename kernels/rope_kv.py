"""Rotary embedding, optional norm of queries and keys, and the write of keys and values to their pages in one launch.

T tokens, H query heads, K key/value heads, D head dimension, N blocks, P tokens per block, ROWS of a page. 8-bit pools
are written in their format (`kernels.kv_pages`), from keys and values that are rounded to the model's dtype first.
Angles and slot mapping are read before the previous kernel has ended: the kernels just before may not write them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.kv_pages import block_size_of


@triton.jit
def rope_and_store_kernel(
    qkv,  # [T, H + 2K, D]: queries are rotated in place
    cos,  # [positions or T, D]
    sin,  # [positions or T, D], the first half negated
    kv,  # [N * ROWS, 2K, D]
    head_scales,  # float32 [2, K] of an fp8 pool, or None: 1
    slot_mapping,  # int64 [T]: block * P + offset; a negative place is not written
    positions,  # int64 [T] or None: the row of cos and sin; None: the token's own
    norm,  # [H + K, D] or None
    eps,
    H,
    K,
    D,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    lanes = tl.arange(0, HALF)[None, :]
    half = D // 2
    inside = (heads < H + 2 * K) & (lanes < half)
    rotated = inside & (heads < H + K)
    dtype = qkv.dtype.element_ty

    # Position and slot are known since the step began; only qkv comes from the previous kernel.
    angle = tl.load(positions + token) if positions is not None else token
    place = tl.load(slot_mapping + token)
    cos_low = tl.load(cos + angle * D + lanes, mask=rotated, other=1.0).to(tl.float32)
    cos_high = tl.load(cos + angle * D + half + lanes, mask=rotated, other=1.0).to(tl.float32)
    sin_low = tl.load(sin + angle * D + lanes, mask=rotated, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle * D + half + lanes, mask=rotated, other=0.0).to(tl.float32)
    wait(PDL)
    source = qkv + (token * (H + 2 * K) + heads) * D + lanes
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        weight = norm + heads * D + lanes
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = 1.0 / tl.sqrt_rn(squares / D + eps)
        # Rounded as by a separate norm kernel.
        normed_low = (low * inverse[:, None] * tl.load(weight, mask=rotated, other=0.0)).to(dtype).to(tl.float32)
        normed_high = (high * inverse[:, None] * tl.load(weight + half, mask=rotated, other=0.0)).to(dtype)
        low = tl.where(rotated, normed_low, low)
        high = tl.where(rotated, normed_high.to(tl.float32), high)
    new_low = (low * cos_low + high * sin_low).to(dtype)
    new_high = (high * cos_high + low * sin_high).to(dtype)

    query = inside & (heads < H)
    tl.store(source, new_low, mask=query)
    tl.store(source + half, new_high, mask=query)
    written = inside & (heads >= H) & (place >= 0)
    page, inner = place // P, place % P
    target = kv + ((page * ROWS + inner) * 2 * K + heads - H) * D + lanes
    if kv.dtype.element_ty == tl.int8:
        wide_low, wide_high = new_low.to(tl.float32), new_high.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide_low), 1), tl.max(tl.abs(wide_high), 1)) * (1.0 / 127.0)
        inverse = tl.where(scale > 0, 1.0 / scale, 0.0)[:, None]
        stored_low = tl.floor(wide_low * inverse + 0.5).to(tl.int8)
        stored_high = tl.floor(wide_high * inverse + 0.5).to(tl.int8)
        scales = kv.to(tl.pointer_type(tl.float32), bitcast=True) + (page * ROWS + P) * (K * D // 2) + inner * 2 * K
        tl.store(scales + heads - H, scale[:, None], mask=(heads >= H) & (heads < H + 2 * K) & (place >= 0))
    elif kv.dtype.element_ty == tl.float8e4nv:
        stored_low, stored_high = new_low.to(tl.float32), new_high.to(tl.float32)
        if head_scales is not None:
            inverse = 1.0 / tl.load(head_scales + heads - H, mask=(heads >= H) & (heads < H + 2 * K), other=1.0)
            stored_low, stored_high = stored_low * inverse, stored_high * inverse
        stored_low = tl.clamp(stored_low, -448.0, 448.0).to(tl.float8e4nv)
        stored_high = tl.clamp(stored_high, -448.0, 448.0).to(tl.float8e4nv)
    else:
        stored_low, stored_high = new_low, new_high
    tl.store(target, stored_low, mask=written)
    tl.store(target + half, stored_high, mask=written)


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_NP2KD: Tensor,
    slot_mapping_T: Tensor,
    heads: int,
    kv_heads: int,
    positions_T: Tensor | None = None,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the pool, return the queries: [T, H, D], a view of qkv.

    qkv [T, H + 2K, D], contiguous; its queries are rotated in place. cos, sin [T, 1, D], the first half of sin negated;
    with positions_T (int64 [T]) they are whole tables [positions, 1, D]. slot_mapping_T int64 [T]: block * P + offset;
    negative: not written. qk_norm [H + K, D] normalizes queries and keys first. kv_scales float32 [2, K]: of an fp8
    pool; None: all 1.
    """
    tokens, all_heads, dim = qkv.shape
    assert qkv.is_contiguous()
    assert all_heads == heads + 2 * kv_heads
    if tokens:
        half = triton.next_power_of_2(dim // 2)
        block = min(16, triton.next_power_of_2(all_heads))
        rope_and_store_kernel[(tokens, triton.cdiv(all_heads, block))](
            qkv, cos, sin, kv_NP2KD, kv_scales, slot_mapping_T, positions_T, qk_norm, eps, heads, kv_heads, dim,
            P=block_size_of(kv_NP2KD), ROWS=kv_NP2KD.shape[1], BLOCK_H=block, HALF=half, num_warps=4,
            **launch_options(qkv.device),
        )  # fmt: skip
    return qkv[:, :heads]
