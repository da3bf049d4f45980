"""The gate of the MLP: silu(gate) * up. Knows the two halves of a row, nothing else."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait


@triton.jit
def silu_and_mul_kernel(
    gate_up,  # [T, 2n], contiguous
    out,  # [T, n]
    n,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    gate = tl.load(gate_up + row * 2 * n + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension: [T, 2n] -> [T, n]."""
    assert gate_up.is_contiguous()
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(n))
    if rows:
        silu_and_mul_kernel[(rows, triton.cdiv(n, block))](
            gate_up, out, n, BLOCK=block, num_warps=4, **launch_options(gate_up.device)
        )
    return out
