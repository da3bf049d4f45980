"""The most likely tokens of each row and their log-probabilities, in two launches: of chunks, then of their best."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import begin, launch_options


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
    """The `most` largest of BLOCK columns, in order; the lowest id of equals."""
    begin(PDL)
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


def top_logprobs(logits_SV: Tensor, totals_S: Tensor, most: int, chunk: int = 2048) -> tuple[Tensor, Tensor]:
    """Ids (int64) and log-probabilities (float32) of the `most` likely tokens of each row, both [S, most]."""
    rows, vocab = logits_SV.shape
    device = logits_SV.device
    chunks = triton.cdiv(vocab, chunk)
    some = torch.empty(rows, chunks * most, dtype=torch.float32, device=device)
    some_ids = torch.empty(rows, chunks * most, dtype=torch.int32, device=device)
    best = torch.empty(rows, most, dtype=torch.float32, device=device)
    ids = torch.empty(rows, most, dtype=torch.int64, device=device)
    if rows and most:
        width = chunks * most
        top_kernel[(chunks, rows)](
            logits_SV, None, None, some, some_ids, vocab, logits_SV.stride(0), most, BLOCK=chunk, num_warps=4,
            **launch_options(device),
        )  # fmt: skip
        top_kernel[(1, rows)](
            some, some_ids, totals_S, best, ids, width, width, most, BLOCK=triton.next_power_of_2(width), num_warps=8,
            **launch_options(device),
        )  # fmt: skip
    return ids, best
