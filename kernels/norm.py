"""RMS norm and layer norm, in one fixed order for each row, also of a sum.

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


@triton.jit
def layer_normed(x, weight, bias, columns, inside, n, eps):
    """The layer norm of rows x [ROWS, BLOCK] in float32, of which columns `inside` count."""
    centered = tl.where(inside[None, :], x - (tl.sum(x, 1) / n)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centered * centered, 1) / n + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return centered * inverse[:, None] * scale[None, :] + shift[None, :]


@triton.jit(do_not_specialize=["T"])
def add_layer_norm_kernel(
    x,  # [T, n], contiguous
    added,  # [n] or None: to each row
    residual,  # [T, n], contiguous
    weight,  # [n]
    bias,  # [n]
    out,  # [T, n]; may be x or the residual
    T, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program normalizes ROWS rows: few numbers of a row would keep too few loads in flight."""
    wait(PDL)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = columns < n
    here = (rows < T)[:, None] & inside[None, :]
    places = rows.to(tl.int64)[:, None] * n + columns
    number = tl.load(x + places, mask=here, other=0.0).to(tl.float32)
    number += tl.load(residual + places, mask=here, other=0.0).to(tl.float32)
    if added is not None:
        number += tl.load(added + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = layer_normed(number, weight, bias, columns, inside, n, eps)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=here)


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


def add_layer_norm(x: Tensor, added: Tensor | None, residual: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
    """layer_norm(x + added + residual). x and residual [T, n], contiguous; added [n]; out may be one of them. The sum
    is not rounded before it is normalized."""
    assert norm.kind is NormKind.LAYER, norm.kind
    assert x.is_contiguous()
    assert residual.is_contiguous()
    count, n = x.shape
    if out is None:
        out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    rows = rows_of_program(block)
    if count:
        add_layer_norm_kernel[(triton.cdiv(count, rows),)](
            x, added, residual, norm.weight, norm.bias, out, count, n, norm.eps,
            ROWS=rows, BLOCK=block, num_warps=4, **launch_options(x.device),
        )  # fmt: skip
    return out


def rows_of_program(block: int) -> int:
    """How many rows of `block` numbers four warps normalize at a time."""
    return max(1, min(8, 4096 // block))
