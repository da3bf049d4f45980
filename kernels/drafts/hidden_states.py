"""Keeps hidden states of a step's tokens beside the KV pool, and reads those of the tokens before others. Knows places,
positions and block tables, no sequences.

    T tokens of a step    R rows    B blocks of a table    P tokens per block    W width    N numbers of a place

A place is block * P + offset, as in `kernels.step_io`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.step_io import StepInputs

_BLOCK = 2048


@triton.jit
def keep_kernel(
    x,  # [T, W]
    slot_mapping,  # int64 [T]
    states,  # [places, N] out
    W, N, column,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of one token's numbers; those that are not finite become 0."""
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(slot_mapping + token)
    inside = (columns < W) & (place >= 0)
    number = tl.load(x + token * W + columns, mask=inside, other=0.0).to(tl.float32)
    number = tl.where(number - number == 0.0, number, 0.0)  # x - x is not 0 for NaN and infinity only.
    tl.store(states + place * N + column + columns, number.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def before_kernel(
    positions,  # int64 [T]
    starts,  # int32 [R + 1]
    tables,  # int32 [R, B]
    states,  # [places, N]
    out,  # [T, N] out
    R, B, N,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of the numbers of the token before one; zeros before the first one of a sequence, and for padding."""
    wait(PDL)
    token = tl.program_id(0)
    row = tl.full((), 0, tl.int32)  # how many rows end before the token
    for first in range(0, R, ROWS):
        rows = first + tl.arange(0, ROWS)
        ends = tl.load(starts + 1 + rows, mask=rows < R, other=token + 1)
        row += tl.sum((ends <= token).to(tl.int32))
    before = tl.load(positions + token) - 1
    known = (before >= 0) & (row < R)
    block = tl.load(tables + row.to(tl.int64) * B + before // P, mask=known, other=0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    number = tl.load(states + (block * P + before % P) * N + columns, mask=inside & known, other=0.0)
    tl.store(out + token.to(tl.int64) * N + columns, number, mask=inside)


def keep(x: Tensor, slot_mapping: Tensor, states: Tensor, column: int) -> None:
    """states[slot_mapping[t], column : column + W] = x[t], with 0 for numbers that are not finite.

    x [T, W], contiguous; slot_mapping int64 [T]: places, -1: the token is not kept; states [places, N], contiguous.
    """
    tokens, width = x.shape
    assert x.is_contiguous()
    assert states.is_contiguous()
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(width))
        keep_kernel[(tokens, triton.cdiv(width, block))](
            x, slot_mapping, states, width, states.shape[1], column,
            BLOCK=block, num_warps=min(8, max(1, block // 256)), **launch_options(x.device),
        )  # fmt: skip


def before(inputs: StepInputs, states: Tensor, block_size: int) -> Tensor:
    """What is kept of the token before each of a step's tokens, [T, N]; zeros where there is none. The inputs are
    unpacked; states [places, N], contiguous."""
    tokens, numbers = len(inputs.token_ids), states.shape[1]
    assert states.is_contiguous()
    out = torch.empty(tokens, numbers, dtype=states.dtype, device=states.device)
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(numbers))
        before_kernel[(tokens, triton.cdiv(numbers, block))](
            inputs.positions, inputs.starts, inputs.tables, states, out, len(inputs.contexts), inputs.tables.shape[1],
            numbers, P=block_size, ROWS=64, BLOCK=block, num_warps=min(8, max(1, block // 256)),
            **launch_options(states.device),
        )  # fmt: skip
    return out
