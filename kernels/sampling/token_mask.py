"""Forbids tokens by a packed mask: writes minus infinity over their logits. Knows lines and bits, no grammar."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait

_BLOCK = 1024


@triton.jit
def mask_kernel(
    logits,  # [S, V] in and out, rows `stride` apart
    lines,  # int64 [M]: the line of the logits that a mask belongs to; below 0: none
    masks,  # int32 [M, W]: bit v % 32 of word v // 32: token v may be drawn
    V, W, stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(1).to(tl.int64)
    number = tl.load(lines + row)
    if number < 0:
        return
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + row * W + ids // 32, mask=ids // 32 < W, other=0)
    forbidden = (word >> (ids % 32)) & 1 == 0
    line = logits + number * stride
    tl.store(line + ids, float("-inf"), mask=forbidden & (ids < V))


def mask_logits(logits_SV: Tensor, lines_M: Tensor, masks_MW: Tensor) -> None:
    """As `reference.sampling.mask_logits`. lines_M int64, masks_MW int32, contiguous. No line occurs twice; masks of
    lines below 0 are not read."""
    vocab, (count, words) = logits_SV.shape[1], masks_MW.shape
    assert logits_SV.stride(1) == 1
    assert masks_MW.is_contiguous()
    if count:
        mask_kernel[(triton.cdiv(vocab, _BLOCK), count)](
            logits_SV, lines_M, masks_MW, vocab, words, logits_SV.stride(0), BLOCK=_BLOCK, num_warps=4,
            **launch_options(logits_SV.device),
        )  # fmt: skip
