"""Products of many experts in one launch: each row of x with the weight of the expert that computes it.

The rows of an expert are cut into tiles, as `kernels.moe.routing` has sorted them; which tile of which expert a program
computes, it finds out on the device. Weights are converted in registers; x is not rounded.

    T tokens    E experts    k experts that compute a token    entry t * k + i    N outputs    K inputs
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.device import shared_bytes
from kernels.moe.reference import Routes
from kernels.moe.weights import ExpertStack


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program. Not tuned on a device yet."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


FEW, SOME, MANY = Tile(16, 64, 128, 4, 4), Tile(32, 128, 64, 4, 4), Tile(128, 128, 64, 3, 8)
"""By the mean number of an expert's rows: up to 16, up to 64, more."""
EXACT = Tile(16, 32, 32, 2, 4)
"""For rows in float32."""


def tile_for(entries: int, experts: int, dtype: torch.dtype, invariant: bool) -> Tile:
    """The tile for `entries` entries; an invariant one does not depend on their number."""
    if dtype == torch.float32:
        return EXACT
    if invariant:
        return SOME
    mean = entries / experts
    return FEW if mean <= FEW.rows else SOME if mean <= 64 else MANY


@triton.jit
def _numbers(
    values,  # [BLOCK_N] pointers to the rows of an expert's values
    zero,  # [BLOCK_N] pointers to the rows of its zeros, or None
    start, columns, K, known,
    half: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Weights of BLOCK_N outputs from input `start` on, not scaled: [BLOCK_N, BLOCK_K]; of e4m3 divided by 256."""
    BLOCK_K: tl.constexpr = columns.shape[0]
    BLOCK_N: tl.constexpr = known.shape[0]
    if KIND == "int4":
        pairs = tl.arange(0, BLOCK_K // 2)
        octets = tl.load(values[:, None] + (start // 2 + pairs)[None, :], mask=known[:, None], other=0)
        found = tl.reshape(tl.join(octets & 15, octets >> 4), [BLOCK_N, BLOCK_K]).to(tl.int8)
        if zero is not None:
            found -= tl.load(zero + start // GROUP, mask=known, other=0).to(tl.int8)[:, None]
        else:
            found -= 8
        return found.to(half)
    inside = known[:, None]
    if not EVEN:
        inside = inside & (start + columns < K)[None, :]
    found = tl.load(values[:, None] + (start + columns)[None, :], mask=inside, other=0)
    if KIND == "fp8":
        # The exponent of float16 has another bias, and its bits begin one further to the right.
        bits = found.to(tl.int16)
        found = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True)
    return found.to(half)


@triton.jit
def _tile_of(offsets, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The program's work: whether there is any, the expert, and its tile's first place and the end of the expert's."""
    experts = tl.arange(0, BLOCK_E)
    first = tl.load(offsets + experts, mask=experts < E, other=0)
    stop = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    tiles = tl.cdiv(stop - first, BLOCK_M)
    end = tl.cumsum(tiles, 0)
    index = tl.program_id(0)
    here = (end - tiles <= index) & (index < end)
    expert = tl.sum(tl.where(here, experts, 0))
    place = tl.sum(tl.where(here, first + (index - end + tiles) * BLOCK_M, 0))
    return index < tl.sum(tiles), expert, place, tl.sum(tl.where(here, stop, 0))


@triton.jit
def grouped_kernel(
    x,  # [entries / DIVIDE, K]
    values,  # [E, N, K], or [E, N, K / 2] with two numbers in a byte
    scale,  # [E, cdiv(N, ROWS), cdiv(K, GROUP) or 1] or None
    zero,  # uint8 [E, N, K / GROUP] or None
    inputs_of,  # int32 [E, K] or None: the input that each stored column is for
    order,  # int32 [entries]
    offsets,  # int32 [E + 1]
    out,  # [entries, N]
    N, K,
    E: tl.constexpr, BLOCK_E: tl.constexpr, DIVIDE: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of outputs): row e of the result is x[e // DIVIDE] @ W[expert of e].T."""
    wait(PDL)
    exists, expert, place, stop = _tile_of(offsets, E, BLOCK_E, BLOCK_M)
    if not exists:
        return
    places = place + tl.arange(0, BLOCK_M)
    entry = tl.load(order + places, mask=places < stop, other=0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = outputs < N
    columns = tl.arange(0, BLOCK_K)
    row = expert.to(tl.int64) * N + outputs
    half: tl.constexpr = x.dtype.element_ty
    precision: tl.constexpr = "ieee" if half == tl.float32 else "tf32"
    weights = values + row * (K // 2 if KIND == "int4" else K)
    groups = tl.cdiv(K, GROUP) if GROUP else 1
    scales, zeros = scale, zero
    if scale is not None:
        scales = scale + (expert.to(tl.int64) * tl.cdiv(N, ROWS) + outputs // ROWS) * groups
    if zero is not None:
        zeros = zero + row * groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (places < stop)[:, None]
        if not EVEN:
            inside = inside & (start + columns < K)[None, :]
        inputs = start + columns
        if inputs_of is not None:
            inputs = tl.load(inputs_of + expert * K + inputs)
        a = tl.load(x + (entry // DIVIDE)[:, None] * K + inputs[None, :], mask=inside, other=0.0)
        b = _numbers(weights, zeros, start, columns, K, known, half, KIND, GROUP, EVEN)
        product = tl.dot(a, tl.trans(b), input_precision=precision)
        if GROUP:
            product *= tl.load(scales + start // GROUP, mask=known, other=0.0).to(tl.float32)[None, :]
        total += product
    if KIND != "plain" and GROUP == 0:
        total *= tl.load(scales, mask=known, other=0.0).to(tl.float32)[None, :]
    if KIND == "fp8":
        total *= 256
    target = out + entry[:, None] * N + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(places < stop)[:, None] & known[None, :])


def multiply(x: Tensor, experts: ExpertStack, routes: Routes, *, divide: int, invariant: bool = False) -> Tensor:
    """For each entry e of the routes, x[e // divide] times the weight of its expert: [entries, N] in x's dtype.

    x [entries / divide, K], contiguous; divide is k for rows of tokens and 1 for rows of entries. invariant: a row's
    bits do not depend on the other rows or their number.
    """
    entries, layout, (outputs, inputs) = len(routes.order), experts.layout, (experts.outputs, experts.inputs)
    assert tuple(x.shape) == (entries // divide, inputs), (x.shape, entries, divide, inputs)
    assert x.is_contiguous()
    out = torch.empty(entries, outputs, dtype=x.dtype, device=x.device)
    tile = tile_for(entries, experts.count, x.dtype, invariant)
    width = math.gcd(layout.group, tile.inputs) if layout.group else tile.inputs
    stages = tile.stages if shared_bytes(x.device) >= 110 << 10 else min(tile.stages, 2)
    # Each expert has at most one tile that is not full.
    tiles = min(entries, entries // tile.rows + min(entries, experts.count))
    if entries:
        grouped_kernel[(tiles, triton.cdiv(outputs, tile.outputs))](
            x, layout.values, layout.scale, layout.zero, layout.order, routes.order, routes.offsets, out, outputs,
            inputs, E=experts.count, BLOCK_E=max(16, triton.next_power_of_2(experts.count)), DIVIDE=divide,
            KIND=layout.kind, GROUP=layout.group, ROWS=layout.rows, BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
            BLOCK_K=width, EVEN=inputs % width == 0, STAGES=stages, num_warps=tile.warps, **launch_options(x.device),
        )  # fmt: skip
    return out


@triton.jit
def add_weighted_kernel(
    residual,  # [T, n], changed in place
    results,  # [T * k, n]
    weights,  # float32 [T, k]
    n,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program adds a part of a token's results, one entry after the other."""
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        entry = token * CHOSEN + index
        total += tl.load(weights + entry) * tl.load(results + entry * n + columns, mask=inside, other=0.0)
    target = residual + token * n + columns
    total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total.to(residual.dtype.element_ty), mask=inside)


def add_weighted(residual: Tensor, results: Tensor, weights_Tk: Tensor) -> None:
    """residual [T, n] += the results [T * k, n] of each token's entries, weighted; the sum is kept in float32."""
    (tokens, n), chosen = residual.shape, weights_Tk.shape[1]
    assert residual.is_contiguous()
    assert results.is_contiguous()
    block = min(1024, triton.next_power_of_2(n))
    if tokens:
        add_weighted_kernel[(tokens, triton.cdiv(n, block))](
            residual, results, weights_Tk, n, CHOSEN=chosen, BLOCK=block, num_warps=4, **launch_options(residual.device)
        )
