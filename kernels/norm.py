"""RMS norm, alone and with the residual addition before it. One program normalizes one row, in one fixed order.

T rows, n numbers in a row. A row's bits depend on nothing but the row, so the deterministic mode uses these too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait


@triton.jit
def rms_norm_kernel(
    x,  # [T, n], rows x_stride apart
    delta,  # [T, n] or None: added to x first, in place
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
    number = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if delta is not None:
        # The sum is rounded to the residual's dtype before it is normalized: later layers see the same number.
        number = number.to(tl.float32) + tl.load(delta + row * n + columns, mask=inside, other=0.0).to(tl.float32)
        number = number.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + columns, number, mask=inside)
    number = number.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(number * number) / n + eps)
    tl.store(out + row * n + columns, (number * inverse * scale).to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, n = x.shape
    assert x.stride(1) == 1
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n)
    if rows:
        rms_norm_kernel[(rows,)](
            x, delta, weight, out, n, weight.numel() // n, x.stride(0), eps,
            BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., n], weight [n] or [groups, n] for x [..., groups, n]."""
    return _launch(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `residual` in place, then rms_norm of the sum. All [T, n], delta contiguous."""
    assert delta.is_contiguous()
    return _launch(residual, delta, weight, eps)
