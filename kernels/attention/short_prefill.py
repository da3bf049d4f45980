"""Attention of steps whose rows each see at most 128 keys, such as a short prompt by itself, for low latency. Names as
in `kernels.attention`; the pool has the queries' dtype, of 16 bits.

All keys of a row form one tile: there is no loop and no running maximum, and the code is short, which matters because
it is fetched once and runs once. Rows of one token are handled like others, so one kernel serves the step. A program
reads which tokens it computes and where their keys are before the previous kernel has ended; this is safe because a
step's first layer begins with kernels that call `dependent_launch.wait_exclusive`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.attention.decode_8bit import FLOOR
from kernels.attention.scores import LOG2E, add_sinks, cap_of, cap_scores
from kernels.dependent_launch import launch_options, wait_exclusive
from kernels.operands import Scores

KEYS = 128
"""The longest context of a row."""
QUERIES, WARPS = 64, 8
"""Query rows (M) and warps of a program."""


@triton.jit
def _tile_of(starts, contexts, R, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The program's work: whether there is any, row, tile of the row, the row's first token, tokens and context.

    Programs of the K heads of a tile have consecutive ids.
    """
    rows = tl.arange(0, BLOCK_R)
    first = tl.load(starts + rows, mask=rows < R, other=0)
    lengths = tl.load(starts + rows + 1, mask=rows < R, other=0) - first
    context = tl.load(contexts + rows, mask=rows < R, other=0)
    tiles = tl.cdiv(lengths, TOKENS)
    end = tl.cumsum(tiles, 0)
    index = tl.program_id(0) // K
    here = (end - tiles <= index) & (index < end)
    row, before = tl.sum(tl.where(here, rows, 0)), tl.sum(tl.where(here, end - tiles, 0))
    start, length = tl.sum(tl.where(here, first, 0)), tl.sum(tl.where(here, lengths, 0))
    return index < tl.sum(tiles), row, index - before, start, length, tl.sum(tl.where(here, context, 0))


@triton.jit(do_not_specialize=["R", "B"])
def short_prefill_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, P, 2, K, D]
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]: at most TILE
    tables,  # int32 [R, B]
    sinks,  # float32 [H] or None
    R, B, q_stride, scale,
    K: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr,
    BLOCK_R: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, head) computes M // SHARE tokens of one row. Keys beyond the last needed one are loaded as copies
    of it, so that no load is masked."""
    TOKENS: tl.constexpr = M // SHARE
    if PDL:
        gdc_launch_dependents()
    exists, row, tile, start, length, context = _tile_of(starts, contexts, R, K, TOKENS, BLOCK_R)
    lines = tl.arange(0, M)
    lanes = tl.arange(0, D)
    keys = tl.arange(0, TILE)
    token = tile * TOKENS + lines // SHARE
    newest = context - length + token
    last = tl.minimum(context - length + (tile + 1) * TOKENS, context) - 1
    needed = tl.minimum(keys, tl.maximum(last, 0))
    page = tl.load(tables + row.to(tl.int64) * B + needed // P).to(tl.int64)
    wait_exclusive(PDL)
    if not exists:
        return
    head = tl.program_id(0) % K
    source = kv + ((page * P + needed % P) * (2 * K * D) + head * D)[:, None] + lanes
    k, v = tl.load(source), tl.load(source + K * D)
    column = (head * SHARE + lines % SHARE) * D
    asked = (start + tl.minimum(token, length - 1)).to(tl.int64)
    query = tl.load(q + (asked * q_stride + column)[:, None] + lanes)
    scores = tl.dot(query, tl.trans(k)) * scale
    if CAP is not None:
        scores = cap_scores(scores, CAP)
    scores = tl.where(keys[None, :] <= newest[:, None], scores, FLOOR)
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - top[:, None])
    total = tl.sum(weights, 1)
    if sinks is not None:
        total = add_sinks(top, total, sinks, head * SHARE + lines % SHARE)
    mixed = tl.dot(weights.to(v.dtype), v) * (1.0 / total)[:, None]
    inside = (token < length) & (lines < TOKENS * SHARE)
    target = out + (asked * (K * SHARE * D) + column)[:, None] + lanes
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside[:, None])


@dataclass(frozen=True, slots=True)
class ShortPrefillPlan:
    """The rows of a step, none with a context above KEYS tokens; valid for windows of at least KEYS tokens, too."""

    starts: Tensor
    """int32 [R + 1]: the first token of each row, and T. Rows without tokens are skipped."""
    contexts: Tensor
    """int32 [R]: context length of each row, its tokens of this step included."""
    tables: Tensor
    """int32 [R, B]: block table of each row."""


def serves_short_prefill(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, stored: torch.dtype, windows: Iterable[int | None]
) -> bool:
    """Whether the kernel supports these shapes, queries of `dtype` and a pool of `stored`."""
    whole = all(window is None or window >= KEYS for window in windows)
    return whole and dim in (64, 128) and heads // kv_heads <= QUERIES and stored == dtype and dtype.itemsize == 2


def attend_short_prefill(q_THD: Tensor, kv_NP2KD: Tensor, plan: ShortPrefillPlan, out: Tensor, scores: Scores) -> None:
    """Attention of all rows."""
    _, block_size, _, kv_heads, dim = kv_NP2KD.shape
    (tokens, heads, _), rows = q_THD.shape, len(plan.contexts)
    assert serves_short_prefill(heads, kv_heads, dim, q_THD.dtype, kv_NP2KD.dtype, ()), (
        q_THD.shape,
        kv_NP2KD.shape,
        kv_NP2KD.dtype,
    )
    share = heads // kv_heads
    # Each row has at most one tile that is not full.
    tiles = triton.cdiv(tokens, QUERIES // share) + min(rows, tokens) - 1
    short_prefill_kernel[(tiles * kv_heads,)](
        q_THD, kv_NP2KD, out, plan.starts, plan.contexts, plan.tables, scores.sinks, rows, plan.tables.shape[1],
        q_THD.stride(0), scores.scale * LOG2E, K=kv_heads, SHARE=share, D=dim, P=block_size, TILE=KEYS, M=QUERIES,
        BLOCK_R=triton.next_power_of_2(rows), CAP=cap_of(scores), num_warps=WARPS, **launch_options(out.device),
    )  # fmt: skip
