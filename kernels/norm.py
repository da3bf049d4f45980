"""RMS norm and layer norm. One program normalizes one row, in one fixed order.

T rows, n numbers in a row. A row's bits depend on the row alone, so the deterministic mode uses these kernels too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.operands import Norm, NormKind


@triton.jit
def rms_norm_kernel(
    x,  # [T, n], rows x_stride apart
    weight,  # [groups, n]: row t takes t % groups
    out,  # [T, n]
    n,
    groups,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    scale = tl.load(weight + (row % groups) * n + columns, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    number = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(number * number) / n + eps)
    tl.store(out + row * n + columns, (number * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(
    x,  # [T, n], rows x_stride apart
    weight,  # [n]
    bias,  # [n] or None
    out,  # [T, n]
    n,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    number = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # The variance is summed over the centered row: sum(x^2) - n * mean^2 cancels where the mean is large.
    centered = tl.where(inside, number - tl.sum(number) / n, 0.0)
    result = centered * (1.0 / tl.sqrt_rn(tl.sum(centered * centered) / n + eps)) * scale
    if bias is not None:
        result += shift
    tl.store(out + row * n + columns, result.to(out.dtype.element_ty), mask=inside)


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """The norm over the last dimension of x."""
    if norm.kind is NormKind.RMS:
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., n], weight [n] or [groups, n] for x [..., groups, n]."""
    rows = x.reshape(-1, x.shape[-1])
    count, n = rows.shape
    assert rows.stride(1) == 1
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n)
    if count:
        rms_norm_kernel[(count,)](
            rows, weight, out, n, weight.numel() // n, rows.stride(0), eps,
            BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / standard deviation * weight + bias over the last dimension. x [..., n], weight and bias [n]."""
    rows = x.reshape(-1, x.shape[-1])
    count, n = rows.shape
    assert rows.stride(1) == 1
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n)
    if count:
        layer_norm_kernel[(count,)](
            rows, weight, bias, out, n, rows.stride(0), eps,
            BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out.view(x.shape)
