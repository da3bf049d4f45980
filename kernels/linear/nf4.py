"""Dequantizes NF4 weights to 16-bit floats, for products without an NF4 kernel. Knows no product."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.quantized_weights import NF4_BLOCK, Nf4Weight


@triton.jit
def dequantize_nf4_kernel(
    packed,  # uint8 [N * K / 2], even numbers in the high halves
    absmax,  # float32 [N * K / 64]
    code,  # float32 [16]
    out,  # [N * K]
    count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Dequantize 2 * BLOCK numbers."""
    wait(PDL)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    both = tl.load(packed + places, mask=inside, other=0).to(tl.int32)
    scale = tl.load(absmax + places // 32, mask=inside, other=0.0)
    numbers = tl.join(tl.load(code + (both >> 4)) * scale, tl.load(code + (both & 15)) * scale)
    tl.store(out + tl.join(2 * places, 2 * places + 1), numbers.to(out.dtype.element_ty), mask=tl.join(inside, inside))


def dequantize_nf4(weight: Nf4Weight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight [N, K]."""
    assert NF4_BLOCK == 64, "the kernel reads one absmax for 32 bytes"
    out = torch.empty(weight.shape, dtype=dtype, device=weight.packed.device)
    count, block = weight.packed.numel(), 1024
    dequantize_nf4_kernel[(triton.cdiv(count, block),)](
        weight.packed, weight.absmax, weight.code, out, count, BLOCK=block, num_warps=4, **launch_options(out.device)
    )
    return out
