"""Attention of packed texts: each token sees all tokens of its own text. No padding, no mask of positions, no pages.

    T tokens of a batch    B texts    H heads    D head dimension    M queries of a tile    N tiles

A tile is some queries of one text; its program (tile, head) reads the text's keys and values once (online softmax,
Milakov and Gimelshein 2018). Where texts begin is read on the device and the grid depends on shapes alone, so that a
launch can be captured in a CUDA graph for any texts of as many tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.scores import LOG2E
from kernels.dependent_launch import launch_options, wait

FEW_TOKENS = 2048
"""Batches of up to this many tokens have smaller tiles, so that more multiprocessors have one."""
TILE_WORDS = 3
"""Words of a tile: its first query, the first token of its text, the first token behind its text."""


@triton.jit
def attend_keys(
    q,  # [M, WIDTH]
    keys,  # [TILE, WIDTH]: pointers
    values,  # distance of the values from the keys
    low, length, scale, top, total, mixed,
    D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Continue the softmax with the keys from `low` on; MASKED: there may be less than TILE."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    inside = low + tl.arange(0, TILE) < length
    if MASKED or WIDTH != D:
        here = inside[:, None] & (tl.arange(0, WIDTH) < D)[None, :]
        k, v = tl.load(keys, mask=here, other=0.0), tl.load(keys + values, mask=here, other=0.0)
    else:
        k, v = tl.load(keys), tl.load(keys + values)
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    if MASKED:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    faded = tl.exp2((top - highest) * scale)
    weights = tl.exp2(scores * scale - (highest * scale)[:, None])
    total = total * faded + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * faded[:, None], input_precision=precision)
    return highest, total, mixed


@triton.jit
def packed_attention_kernel(
    qkv,  # [T, 3, H, D], contiguous
    out,  # [T, H, D]
    tiles,  # int32 [N, TILE_WORDS]; an empty one is all zeros
    scale,  # times log2(e); positive
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, head) computes up to M queries. Heads are neighbours: they read the same rows."""
    wait(PDL)
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, begin, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if first >= end:
        return
    lanes, rows = tl.arange(0, WIDTH), first + tl.arange(0, M)
    # Queries beyond the text's last are copies of it, which are not stored.
    asked = tl.minimum(rows, end - 1).to(tl.int64)[:, None] * (3 * H * D) + head * D + lanes
    q = tl.load(qkv + asked, mask=(lanes < D)[None, :], other=0.0)
    keys = qkv + (begin + tl.arange(0, TILE)).to(tl.int64)[:, None] * (3 * H * D) + (H + head) * D + lanes
    length = end - begin
    whole = length // TILE * TILE
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, WIDTH], tl.float32)
    for low in tl.range(0, whole, TILE, num_stages=STAGES):
        at = keys + tl.cast(low, tl.int64) * (3 * H * D)
        top, total, mixed = attend_keys(
            q, at, H * D, low, length, scale, top, total, mixed, D, TILE, WIDTH, False, IEEE
        )
    if whole < length:
        at = keys + tl.cast(whole, tl.int64) * (3 * H * D)
        top, total, mixed = attend_keys(
            q, at, H * D, whole, length, scale, top, total, mixed, D, TILE, WIDTH, True, IEEE
        )
    target = out + rows.to(tl.int64)[:, None] * (H * D) + head * D + lanes
    result = mixed * (1.0 / total)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (lanes < D)[None, :])


@dataclass(frozen=True, slots=True)
class TileShape:
    """Shape of the programs."""

    queries: int
    """M."""
    keys: int
    warps: int
    stages: int


EXACT, EXACT_WIDE, SMALL = TileShape(32, 32, 4, 2), TileShape(32, 32, 4, 1), TileShape(64, 64, 4, 2)
LARGE, LARGE_WIDE, VERY_WIDE = TileShape(128, 64, 4, 3), TileShape(128, 64, 8, 2), TileShape(64, 32, 4, 2)


def shape_for(tokens: int, dim: int, dtype: torch.dtype) -> TileShape:
    """The programs for a batch of this number of tokens."""
    if dtype == torch.float32:
        return EXACT if dim <= 128 else EXACT_WIDE
    if dim > 128:
        return VERY_WIDE
    if tokens <= FEW_TOKENS:
        return SMALL
    return LARGE if dim <= 64 else LARGE_WIDE


def tiles_of(starts: npt.NDArray[np.int32], queries: int) -> npt.NDArray[np.int32]:
    """The tiles [N, TILE_WORDS] of the texts that begin at `starts` [B + 1], the last of which is their end."""
    begins, ends = starts[:-1], starts[1:]
    counts = -(-(ends - begins) // queries)
    firsts = np.cumsum(counts) - counts
    texts = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(texts)) - firsts[texts]
    return np.stack([begins[texts] + places * queries, begins[texts], ends[texts]], axis=1).astype(np.int32)


def most_tiles(tokens: int, texts: int, queries: int) -> int:
    """Most tiles of these numbers of tokens and texts: each text has at most one tile that is not full."""
    return tokens // queries + min(texts, tokens)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of a batch."""

    tiles: Tensor
    """int32 [N, TILE_WORDS] on the device, as `tiles_of` makes them; empty ones may follow, all zeros."""
    shape: TileShape
    """Of the programs, with whose queries the tiles were made."""


def attend_packed(qkv: Tensor, plan: TilePlan, heads: int, out: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of each text: qkv [T, 3 * H * D], contiguous -> [T, H * D]. Rows of no tile are not
    written."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    dim, shape = width // heads, plan.shape
    assert qkv.is_contiguous()
    if out is None:
        out = torch.empty(tokens, width, dtype=qkv.dtype, device=qkv.device)
    packed_attention_kernel[(len(plan.tiles) * heads,)](
        qkv, out, plan.tiles, dim**-0.5 * LOG2E, H=heads, D=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        M=shape.queries, TILE=shape.keys, IEEE=qkv.dtype == torch.float32, STAGES=shape.stages,
        num_warps=shape.warps, **launch_options(qkv.device),
    )  # fmt: skip
    return out
