"""Products of many experts in one launch: each row of x with the weight of the expert that computes it.

The rows of an expert are cut into tiles, as `kernels.moe.routing` has sorted them; which tile of which expert a program
computes, it finds out on the device. Quantized weights are converted in registers, as in `kernels.linear.packed_gemm`,
and x is not rounded, except where `kernels.moe.grouped_fp8` serves many rows. On a rank that has some experts of a
layer, E is the number of these; other entries have no tile.

    T tokens    E experts    k experts that compute a token    entry t * k + i    N outputs    K inputs
    C chunks of 128 inputs
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import activate
from kernels.dependent_launch import launch_options, prefetch, wait
from kernels.device import has_asm, shared_bytes
from kernels.linear import fp8
from kernels.linear.packed import CHUNK, PackedWeight, minus_zero, packed_rows
from kernels.linear.packed_gemm import add_product
from kernels.moe import grouped_fp8
from kernels.moe.reference import Routes
from kernels.moe.tiles import Tile, expected_entries, expected_tiles, gated, most_tiles, tile_of
from kernels.moe.weights import ExpertStack
from kernels.operands import Activation

FEW, SOME, MANY = Tile(16, 64, 128, 4, 4), Tile(64, 128, 64, 4, 8), Tile(128, 256, 64, 3, 8)
PLAIN = ((16, FEW), (64, SOME), (None, MANY))
"""By the mean number of an expert's rows, at most this. Measured on one H200."""
MANY_SMALL = Tile(128, 128, 64, 2, 8)
"""On GPUs with less than 110 KiB of shared memory a program, where all tiles have two stages at most."""
INVARIANT = Tile(32, 128, 64, 4, 4)
EXACT = Tile(16, 32, 32, 2, 4)
"""For rows in float32."""
FEW_PACKED, SOME_PACKED = Tile(16, 64, CHUNK, 4, 4), Tile(64, 128, CHUNK, 3, 8)
PACKED = (
    (12, FEW_PACKED), (24, Tile(32, 64, CHUNK, 3, 4)), (64, SOME_PACKED), (None, Tile(128, 128, CHUNK, 3, 8))
)  # fmt: skip
"""Of quantized weights, likewise. Some experts have more rows than the mean, and each further tile of an expert
converts its weights anew."""
_PROGRAMS, _LEAST_CHUNKS = 792, 8
"""Programs that a Hopper runs at a time, for which few rows of quantized weights are split; and chunks of a part."""
_GATED_ROWS = 64
"""Rows of a tile up to which a product gates its outputs itself: of more, two sums do not fit into the registers."""


def tile_for(entries: int, experts: int, x: Tensor, packed: bool, invariant: bool) -> Tile:
    """The tile for `entries` entries of rows like x; an invariant one does not depend on their number."""
    if x.dtype == torch.float32:
        return EXACT
    small = shared_bytes(x.device) < 110 << 10
    if invariant:
        chosen = SOME_PACKED if packed else INVARIANT
    else:
        tiles = PACKED if packed else PLAIN
        chosen = next(tile for most, tile in tiles if most is None or entries <= most * experts)
        chosen = MANY_SMALL if small and chosen is MANY else chosen
    return replace(chosen, stages=2) if small else chosen


@triton.jit
def grouped_kernel(
    x,  # [entries / DIVIDE, K]
    weights,  # [E, N, K]; with GATE [E, 2N, K], the gates and then the ups
    order,  # int32 [entries]
    offsets,  # int32 [E + 1]
    out,  # [entries, N]
    N, K,
    E: tl.constexpr, BLOCK_E: tl.constexpr, DIVIDE: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of outputs): row e of the result is x[e // DIVIDE] @ W[expert of e].T."""
    wait(PDL)
    exists, _, expert, place, stop = tile_of(offsets, 1, E, BLOCK_E, BLOCK_M)
    if not exists:
        return
    places = place + tl.arange(0, BLOCK_M)
    entry = tl.load(order + places, mask=places < stop, other=0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = outputs < N
    columns = tl.arange(0, BLOCK_K)
    row = expert.to(tl.int64) * (N if GATE == "" else 2 * N) + outputs
    precision: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    inputs = x + (entry // DIVIDE)[:, None] * K + columns[None, :]
    gates, ups = weights + row[:, None] * K + columns[None, :], weights + (row + N)[:, None] * K + columns[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        mine, its = (places < stop)[:, None], known[:, None]
        if not EVEN:
            inside = (start + columns < K)[None, :]
            mine, its = mine & inside, its & inside
        a = tl.load(inputs + start, mask=mine, other=0.0)
        b = tl.load(gates + start, mask=its, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
        if GATE != "":
            c = tl.load(ups + start, mask=its, other=0.0)
            up = tl.dot(a, tl.trans(c), up, input_precision=precision)
    if GATE != "":
        total = gated(total, up, GATE)
    target = out + entry[:, None] * N + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(places < stop)[:, None] & known[None, :])


@triton.jit
def packed_grouped_kernel(
    x,  # [entries / DIVIDE, K]
    packed,  # int32 [E, ...]: `PackedWeight.packed` of each expert; with GATE of [2N, K], the gates and then the ups
    scales,  # [E, tiles of 64 outputs, groups, 64]
    zeros,  # uint8, of the same shape, or None
    inputs_of,  # int64 [E, K] or None: the input that each stored column is for
    order,  # int32 [entries]
    offsets,  # int32 [E + 1]
    out,  # [SPLIT, entries, N]
    N, K, C, groups, words, scale_count, size,  # words and scales of an expert; entries * N
    E: tl.constexpr, BLOCK_E: tl.constexpr, DIVIDE: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `grouped_kernel`, with packed weights; program (tile, block of outputs, split) sums a part of the chunks."""
    wait(PDL)
    exists, _, expert, first, stop = tile_of(offsets, 1, E, BLOCK_E, BLOCK_M)
    if not exists:
        return
    expert = expert.to(tl.int64)
    packed += expert * words
    scales += expert * scale_count
    if zeros is not None:
        zeros += expert * scale_count
    places = first + tl.arange(0, BLOCK_M)
    entry = tl.load(order + places, mask=places < stop, other=0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    PARTS: tl.constexpr = 128 // GROUP if GROUP % 128 else 1
    SIZE: tl.constexpr = 1024 if KIND == "int4" else 32  # words between a row's chunks
    W: tl.constexpr = 16 if KIND == "int4" else 32
    gate = tl.minimum(outputs, N - 1)
    other = gate + N
    lane = tl.arange(0, W)[None, :]
    gates, ups = packed_rows(packed, gate, C, KIND)[:, None] + lane, packed_rows(packed, other, C, KIND)[:, None] + lane
    place, up_place = gate // 64 * groups * 64 + gate % 64, other // 64 * groups * 64 + other % 64
    if ASM and GROUP > 0:  # all scales of the first 64 outputs: waiting for one takes longer than the computation
        lines = tl.minimum(tl.arange(0, 128), groups - 1) * 64
        prefetch(scales + tl.program_id(1) * BLOCK_N // 64 * groups * 64 + lines)
    inner = tl.arange(0, 128 // PARTS)
    inputs = x + (entry // DIVIDE)[:, None] * K
    half: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    minus = tl.broadcast_to(minus_zero(None, place, half), [BLOCK_N, W])
    span = tl.cdiv(C, SPLIT)
    low = tl.program_id(2) * span
    for chunk in tl.range(low, tl.minimum(low + span, C), num_stages=STAGES):
        a = tl.load(gates + chunk * SIZE, eviction_policy="evict_first")
        c = a
        if GATE != "":
            c = tl.load(ups + chunk * SIZE, eviction_policy="evict_first")
        for part in tl.static_range(PARTS):
            column = chunk * 128 + part * (128 // PARTS)
            mask = (places < stop)[:, None]
            if not EVEN:
                mask = mask & (column + inner < K)[None, :]
            source = column + inner
            if inputs_of is not None:
                source = tl.load(inputs_of + expert * K + source, mask=source < K, other=0)
            b = tl.trans(tl.load(inputs + source[None, :], mask=mask, other=0.0))
            total = add_product(total, a, b, scales, zeros, place, column, minus, part, PARTS, half, KIND, GROUP, ASM)
            if GATE != "":
                up = add_product(up, c, b, scales, zeros, up_place, column, minus, part, PARTS, half, KIND, GROUP, ASM)
    if GROUP == 0:
        total *= tl.load(scales + place).to(tl.float32)[:, None]
        if GATE != "":
            up *= tl.load(scales + up_place).to(tl.float32)[:, None]
    if GATE != "":
        total = gated(total, up, GATE)
    target = out + tl.program_id(2).to(tl.int64) * size + entry[:, None] * N + outputs[None, :]
    known = (places < stop)[:, None] & (outputs < N)[None, :]
    tl.store(target, tl.trans(total).to(out.dtype.element_ty), mask=known)


def multiply(x: Tensor, experts: ExpertStack, routes: Routes, *, divide: int, invariant: bool = False) -> Tensor:
    """For each entry e of the routes, x[e // divide] times the weight of its expert: [entries, N] in x's dtype.

    x [entries / divide, K], contiguous; divide is k for rows of tokens and 1 for rows of entries. invariant: a row's
    bits do not depend on the other rows or their number. x is not rounded. Rows of experts that are not own are not
    written.
    """
    return _multiply(x, experts, routes, divide, _tile(x, experts, routes, invariant), "")[0]


def multiply_activate(
    x: Tensor, experts: ExpertStack, routes: Routes, activation: Activation, *, divide: int, invariant: bool = False
) -> Tensor:
    """The activation of `multiply`'s result: [entries, N], or [entries, N / 2] if it is gated."""
    rounds, tile = _rounds(x, experts, routes, invariant), _tile(x, experts, routes, invariant)
    gate = ""
    if activation.is_gated and (rounds or tile.rows <= _GATED_ROWS):
        gate = "gelu" if activation is Activation.GATED_GELU_TANH else "silu"
    if rounds:
        results = grouped_fp8.multiply(fp8.round_rows(x), experts, routes, x.dtype, divide=divide, gate=gate)
    else:
        results = _multiply(x, experts, routes, divide, tile, gate)[0]
    return results if gate else activate(results, activation)


def multiply_add(residual: Tensor, x: Tensor, experts: ExpertStack, routes: Routes, *, invariant: bool = False) -> None:
    """residual [T, N] += the products of the rows of entries, x [entries, K], weighted by the routes."""
    if _rounds(x, experts, routes, invariant):
        results = grouped_fp8.multiply(fp8.round_rows(x), experts, routes, x.dtype, divide=1)
    else:
        tile = _tile(x, experts, routes, invariant)
        split = 1 if invariant else _parts(experts, routes, tile)
        results = _multiply(x, experts, routes, 1, tile, "", split)
    add_weighted(residual, results, routes.weights_Tk, partial=routes.own < routes.experts)


def _parts(experts: ExpertStack, routes: Routes, tile: Tile) -> int:
    """The parts of each sum: of few rows of quantized weights, as many as there are programs at a time."""
    split = 1
    if isinstance(experts.weight, PackedWeight) and tile.rows == FEW_PACKED.rows:
        programs = expected_tiles(routes, tile) * triton.cdiv(experts.outputs, tile.outputs)
        while programs * split < _PROGRAMS and experts.weight.chunks // (2 * split) >= _LEAST_CHUNKS:
            split *= 2
    return split


def _rounds(x: Tensor, experts: ExpertStack, routes: Routes, invariant: bool) -> bool:
    """Whether rows are rounded to fp8, which depends on the number of rows."""
    return not invariant and grouped_fp8.serves(x, experts, routes)


def _tile(x: Tensor, experts: ExpertStack, routes: Routes, invariant: bool) -> Tile:
    packed = isinstance(experts.weight, PackedWeight)
    return tile_for(expected_entries(routes), experts.count, x, packed, invariant)


def _multiply(
    x: Tensor, experts: ExpertStack, routes: Routes, divide: int, tile: Tile, gate: str, split: int = 1
) -> Tensor:
    """-> [split, entries, N] in x's dtype, parts of a sum in float32."""
    entries, inputs = len(routes.order), experts.inputs
    outputs = experts.outputs // 2 if gate else experts.outputs
    assert tuple(x.shape) == (entries // divide, inputs), (x.shape, entries, divide, inputs)
    assert x.is_contiguous()
    assert routes.own == experts.count, (routes.own, experts.count)
    out = torch.empty(split, entries, outputs, dtype=x.dtype if split == 1 else torch.float32, device=x.device)
    if not entries:
        return out
    shape = {
        "E": experts.count, "BLOCK_E": max(16, triton.next_power_of_2(experts.count)), "DIVIDE": divide, "GATE": gate,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "EVEN": inputs % tile.inputs == 0, "num_warps": tile.warps,
        "STAGES": tile.stages, **launch_options(x.device),
    }  # fmt: skip
    grid = (most_tiles(routes, tile), triton.cdiv(outputs, tile.outputs), split)
    weight = experts.weight
    if isinstance(weight, PackedWeight):
        packed_grouped_kernel[grid](
            x, weight.packed, weight.scale, weight.zero, weight.order, routes.order, routes.offsets, out, outputs,
            inputs, weight.chunks, weight.scale.shape[2], weight.packed[0].numel(), weight.scale[0].numel(),
            out[0].numel(), KIND=weight.kind, GROUP=weight.group, SPLIT=split, ASM=has_asm(x.device), **shape,
        )  # fmt: skip
    else:
        grouped_kernel[grid](
            x, weight, routes.order, routes.offsets, out, outputs, inputs, BLOCK_K=tile.inputs, **shape
        )
    return out


@triton.jit
def add_weighted_kernel(
    residual,  # [T, n], changed in place
    results,  # [SPLIT, T * k, n]
    weights,  # float32 [T, k]
    n, size,  # T * k * n
    CHOSEN: tl.constexpr, SPLIT: tl.constexpr, PARTIAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program adds a part of a token's results, one entry after the other. PARTIAL: those of weight 0 are not read:
    they were not written."""
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        entry = token * CHOSEN + index
        weight = tl.load(weights + entry)
        known = inside & (tl.broadcast_to(weight, [BLOCK]) != 0) if PARTIAL else inside
        for split in tl.static_range(SPLIT):
            total += weight * tl.load(results + split * size + entry * n + columns, mask=known, other=0.0)
    target = residual + token * n + columns
    total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total.to(residual.dtype.element_ty), mask=inside)


def add_weighted(residual: Tensor, results: Tensor, weights_Tk: Tensor, *, partial: bool = False) -> None:
    """residual [T, n] += the results [T * k, n] of each token's entries, weighted; the sum is kept in float32. Results
    may come in parts of a sum, [S, T * k, n]. partial: results of weight 0 may be any numbers."""
    (tokens, n), chosen = residual.shape, weights_Tk.shape[1]
    assert residual.is_contiguous()
    assert results.is_contiguous()
    block = min(1024, triton.next_power_of_2(n))
    if tokens:
        add_weighted_kernel[(tokens, triton.cdiv(n, block))](
            residual, results, weights_Tk, n, tokens * chosen * n, CHOSEN=chosen, BLOCK=block, num_warps=4,
            SPLIT=results.numel() // (tokens * chosen * n), PARTIAL=partial, **launch_options(residual.device),
        )  # fmt: skip
