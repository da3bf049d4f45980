"""The most likely tokens of each row and their log-probabilities, in two launches: per chunk, then over chunks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait


@triton.jit
def top_kernel(
    values,  # [S, n]: logits or, in the second round, the chunks' best
    ids,  # int32 [S, n] or None: the column itself
    totals,  # float32 [S] or None: subtracted
    best,  # float32 [S, C, most] out
    best_ids,  # int32 or int64 [S, C, most] out
    n, stride, most,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The `most` largest of BLOCK columns, in descending order; the lowest id first among equals."""
    wait(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * stride + columns, mask=columns < n, other=float("-inf")).to(tl.float32)
    own = columns
    if ids is not None:
        own = tl.load(ids + row * stride + columns, mask=columns < n, other=0x7FFFFFFF)
    place = (row * tl.num_programs(0) + chunk) * most
    less = tl.load(totals + row) if totals is not None else 0.0
    free = columns < n
    for rank in range(most):
        top = tl.max(tl.where(free, x, float("-inf")))
        id = tl.min(tl.where(free & (x == top), own, 0x7FFFFFFF))
        tl.store(best + place + rank, top - less)
        tl.store(best_ids + place + rank, id.to(best_ids.dtype.element_ty))
        free = free & (own != id)


@dataclass(frozen=True, slots=True)
class TopBuffers:
    """Buffers for the `most` likely tokens of S rows, searched in chunks of `chunk` columns."""

    chunk: int
    some: Tensor
    """float32 [S, C * most]: the chunks' best."""
    some_ids: Tensor
    """int32, as `some`."""
    ids: Tensor
    """int64 [S, most]."""
    best: Tensor
    """float32 [S, most]."""


def top_buffers(rows: int, vocab: int, most: int, device: torch.device, chunk: int = 2048) -> TopBuffers:
    """Allocate the buffers that `top_logprobs` fills."""
    width = triton.cdiv(vocab, chunk) * most
    sizes = (width, torch.float32), (width, torch.int32), (most, torch.int64), (most, torch.float32)
    return TopBuffers(chunk, *(torch.empty(rows, columns, dtype=dtype, device=device) for columns, dtype in sizes))


def top_logprobs(logits_SV: Tensor, totals_S: Tensor, into: TopBuffers) -> None:
    """Write the most likely tokens of each row, in descending order, to `into.ids`, log-probabilities to
    `into.best`."""
    rows, vocab = logits_SV.shape
    chunks, (_, most), width = triton.cdiv(vocab, into.chunk), into.ids.shape, into.some.shape[1]
    assert width == chunks * most
    if rows and most:
        top_kernel[(chunks, rows)](
            logits_SV, None, None, into.some, into.some_ids, vocab, logits_SV.stride(0), most, BLOCK=into.chunk,
            num_warps=4, **launch_options(logits_SV.device),
        )  # fmt: skip
        top_kernel[(1, rows)](
            into.some, into.some_ids, totals_S, into.best, into.ids, width, width, most,
            BLOCK=triton.next_power_of_2(width), num_warps=8, **launch_options(logits_SV.device),
        )  # fmt: skip
