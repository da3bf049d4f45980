"""Both ends of an encoder over packed texts: the sum of embeddings, normalized, and the pooling of each text's rows.

T tokens    B texts    n width    V, P, S rows of the tables of tokens, positions and segments
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.norm import layer_normed, rows_of_program
from kernels.operands import Norm, NormKind, Pooling

POOLED_ROWS, POOLED_COLUMNS = 128, 64
"""Rows and columns that a program of the pooling reads at a time."""


@triton.jit(do_not_specialize=["T"])
def embed_texts_kernel(
    token_ids, positions,  # int32 [T]
    segment_ids,  # int32 [T] or None: all 0
    tokens,  # [V, n]
    places,  # [P, n]
    segments,  # [S, n] or None
    weight, bias,  # [n]
    out,  # [T, n]
    T, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known, inside = rows < T, columns < n
    here = known[:, None] & inside[None, :]
    token = tl.load(token_ids + rows, mask=known, other=0).to(tl.int64)
    place = tl.load(positions + rows, mask=known, other=0).to(tl.int64)
    x = tl.load(tokens + token[:, None] * n + columns, mask=here, other=0.0).to(tl.float32)
    x += tl.load(places + place[:, None] * n + columns, mask=here, other=0.0).to(tl.float32)
    if segments is not None:
        if segment_ids is not None:
            segment = tl.load(segment_ids + rows, mask=known, other=0).to(tl.int64)
            x += tl.load(segments + segment[:, None] * n + columns, mask=here, other=0.0).to(tl.float32)
        else:
            x += tl.load(segments + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = layer_normed(x, weight, bias, columns, inside, n, eps)
    tl.store(out + rows.to(tl.int64)[:, None] * n + columns, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def pool_texts_kernel(
    x,  # [T, n]
    starts,  # int32 [B + 1]; a text without tokens gets no vector
    out,  # float32 [B, n]
    n, MEAN: tl.constexpr, MAX: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (text, columns) pools one text."""
    wait(PDL)
    text = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    begin, end = tl.load(starts + text), tl.load(starts + text + 1)
    if begin >= end:
        return
    if MEAN or MAX:
        pooled = tl.full([ROWS, BLOCK], float("-inf") if MAX else 0.0, tl.float32)
        for low in range(begin, end, ROWS):
            rows = low + tl.arange(0, ROWS)
            here = (rows < end)[:, None] & inside[None, :]
            source = x + rows.to(tl.int64)[:, None] * n + columns
            if MAX:
                pooled = tl.maximum(pooled, tl.load(source, mask=here, other=float("-inf")).to(tl.float32))
            else:
                pooled += tl.load(source, mask=here, other=0.0).to(tl.float32)
        vector = tl.max(pooled, 0) if MAX else tl.sum(pooled, 0) / (end - begin)
    else:
        row = (end - 1 if LAST else begin).to(tl.int64)
        vector = tl.load(x + row * n + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + text.to(tl.int64) * n + columns, vector, mask=inside)


def embed_texts(
    token_ids: Tensor,
    positions: Tensor,
    segment_ids: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    segments: Tensor | None,
    norm: Norm,
) -> Tensor:
    """norm(tokens[token_ids] + places[positions] + segments[segment_ids]) -> [T, n].

    ids int32 [T], segment_ids None: all 0; tables [V, n], [P, n], [S, n] or None. A sum is rounded once.
    """
    assert norm.kind is NormKind.LAYER, norm.kind
    count, n = len(token_ids), tokens.shape[1]
    out = torch.empty(count, n, dtype=tokens.dtype, device=tokens.device)
    block = triton.next_power_of_2(n)
    rows = rows_of_program(block)
    if count:
        embed_texts_kernel[(triton.cdiv(count, rows),)](
            token_ids, positions, segment_ids, tokens, places, segments, norm.weight, norm.bias, out, count, n,
            norm.eps, ROWS=rows, BLOCK=block, num_warps=4, **launch_options(out.device),
        )  # fmt: skip
    return out


def pool_texts(x: Tensor, starts: Tensor, pooling: Pooling, out: Tensor | None = None) -> Tensor:
    """The rows of each text in x [T, n], contiguous, become one -> float32 [B, n]. starts int32 [B + 1]: the first row
    of each text, and the end of the last. The row of a text without tokens is not written."""
    assert x.is_contiguous()
    texts, n = len(starts) - 1, x.shape[1]
    if out is None:
        out = torch.empty(texts, n, dtype=torch.float32, device=x.device)
    pool_texts_kernel[(texts, triton.cdiv(n, POOLED_COLUMNS))](
        x, starts, out, n, MEAN=pooling is Pooling.MEAN, MAX=pooling is Pooling.MAX, LAST=pooling is Pooling.LAST,
        ROWS=POOLED_ROWS, BLOCK=POOLED_COLUMNS, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out
