"""Activations of the MLP: SiLU and GELU, gated or not. Knows the rows of one product, nothing else."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.operands import Activation


@triton.jit
def gated_kernel(
    gate_up,  # [T, 2n], contiguous
    out,  # [T, n]
    n,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    gate = tl.load(gate_up + row * 2 * n + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + columns, mask=inside, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gelu_argument(gate) if GELU else gate)
    tl.store(out + row * n + columns, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_argument(x):
    """The argument of the sigmoid: 0.5 * (1 + tanh(u)) is sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def gelu_kernel(
    x,  # [T, n], contiguous
    out,  # [T, n]; may be x
    n,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    number = tl.load(x + row * n + columns, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        result = number * tl.sigmoid(gelu_argument(number))
    else:
        result = 0.5 * number * (1.0 + tl.erf(number * 0.7071067811865476))
    tl.store(out + row * n + columns, result.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x [T, m], contiguous: [T, m], or [T, m / 2] if it is gated. The memory of x may be reused."""
    if activation.is_gated:
        return _gate(x, activation is Activation.GATED_GELU_TANH)
    return gelu(x, tanh=activation is Activation.GELU_TANH, out=x)


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension: [T, 2n] -> [T, n]."""
    return _gate(gate_up, False, out)


def _gate(gate_up: Tensor, gelu: bool, out: Tensor | None = None) -> Tensor:
    assert gate_up.is_contiguous()
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(n))
    if rows:
        gated_kernel[(rows, triton.cdiv(n, block))](
            gate_up, out, n, GELU=gelu, BLOCK=block, num_warps=4, **launch_options(gate_up.device)
        )
    return out


def gelu(x: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
    """GELU of x [T, n], contiguous, exact or by the tanh approximation; `out` may be x."""
    assert x.is_contiguous()
    rows, n = x.shape
    if out is None:
        out = torch.empty_like(x)
    block = min(2048, triton.next_power_of_2(n))
    if rows:
        gelu_kernel[(rows, triton.cdiv(n, block))](
            x, out, n, TANH=tanh, BLOCK=block, num_warps=4, **launch_options(x.device)
        )
    return out
