"""The formats of KV pages: how keys and values are stored, and their reference conversions. Knows no device code.

    N blocks of the pool    P tokens per block    K key/value heads    D head dimension

A pool is one tensor for each layer, [N, rows, 2, K, D], and a page one contiguous block of it, whatever the format:

    the model's own dtype   rows = P
    float8_e4m3fn           rows = P; stored numbers are multiplied by their head's scale, if the checkpoint has scales
    int8                    rows > P: after the values, float32 scales [P, 2, K] of each token's key and value of each
                            head, so that the largest magnitude is stored as 127
"""

import torch
from torch import Tensor

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}
_SCALE_BYTES = 4


def page_rows(block_size: int, dim: int, dtype: torch.dtype) -> int:
    """Rows of a page: one for each token, and those that hold the scales."""
    return block_size + (-(-_SCALE_BYTES * block_size // dim) if dtype == INT8 else 0)


def block_size_of(pool: Tensor) -> int:
    """P, the inverse of `page_rows`. pool [N, rows, 2, K, D]."""
    rows, dim = pool.shape[1], pool.shape[4]
    return rows * dim // (dim + _SCALE_BYTES) if pool.dtype == INT8 else rows


def page_bytes(block_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a block in one layer."""
    return page_rows(block_size, dim, dtype) * 2 * kv_heads * dim * dtype.itemsize


def make_pool(
    blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """A pool of zeros."""
    return torch.zeros(blocks, page_rows(block_size, dim, dtype), 2, kv_heads, dim, dtype=dtype, device=device)


def bytes_of(pool: Tensor) -> Tensor:
    """The pool as uint8 [N, bytes of a page], the same memory."""
    return pool.flatten(1).view(torch.uint8)


def scales_of(pool: Tensor) -> Tensor:
    """The scales of an int8 pool: float32 [N, P, 2, K], the same memory."""
    block_size, (_, _, _, kv_heads, dim) = block_size_of(pool), pool.shape
    values = block_size * 2 * kv_heads * dim
    scales = bytes_of(pool)[:, values : values + block_size * 2 * kv_heads * _SCALE_BYTES]
    return scales.view(torch.float32).view(len(pool), block_size, 2, kv_heads)


# ---- reference ----


def store(pool: Tensor, slot_mapping_T: Tensor, kv_TKD: Tensor, head_scales: Tensor | None) -> None:
    """Write keys and values [T, 2K, D] to their slots (int64 [T]: block * P + offset), rounded to the pool's format.

    head_scales float32 [2, K]: of an fp8 pool; None: all 1.
    """
    block_size, (blocks, rows, _, kv_heads, dim) = block_size_of(pool), pool.shape
    if pool.dtype == FP8:
        limit, inverse = LARGEST[FP8], 1.0 if head_scales is None else 1.0 / head_scales.view(-1, 1)
        kv_TKD = (kv_TKD.float() * inverse).clamp_(-limit, limit).to(FP8)
    elif pool.dtype == INT8:
        kv_TKD, scales = _round_to_int8(kv_TKD)
        scales_of(pool)[slot_mapping_T // block_size, slot_mapping_T % block_size] = scales.view(-1, 2, kv_heads)
    lines = slot_mapping_T if rows == block_size else slot_mapping_T // block_size * rows + slot_mapping_T % block_size
    target = pool.view(blocks * rows, 2 * kv_heads, dim)
    if pool.dtype == FP8:  # index_copy_ does not support fp8
        target, kv_TKD = target.view(torch.uint8), kv_TKD.view(torch.uint8)
    target.index_copy_(0, lines, kv_TKD)


def load(pool: Tensor, blocks: Tensor, head_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys and values of these blocks (int64 [n]), dequantized: [n, P, 2, K, D] of `dtype`."""
    if pool.dtype == FP8:
        pages = bytes_of(pool).index_select(0, blocks).view(FP8).view(-1, *pool.shape[1:]).float()
        return (pages if head_scales is None else pages.mul_(head_scales[:, :, None])).to(dtype)
    pages = pool.index_select(0, blocks)
    if pool.dtype != INT8:
        return pages
    return (pages[:, : block_size_of(pool)].float() * scales_of(pages)[..., None]).to(dtype)


def _round_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [..., D] and their scale [...]; zeros have the scale 0."""
    x = x.float()
    scale = x.abs().amax(dim=-1) * (1 / LARGEST[INT8])
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return torch.floor(x * inverse[..., None] + 0.5).clamp_(-127, 127).to(INT8), scale
