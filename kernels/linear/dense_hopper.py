"""16-bit linear layers of few rows on a Hopper, y = x W^T, in Gluon; bias, residual and gate as in
`kernels.linear.dense`.

One warp loads W and x by the bulk copy engine (TMA): W, which no kernel writes, before the previous kernel has ended.
The chunks of all tiles form one list, of which every program computes an equal share; the program that finishes a tile
last adds its parts.

    M rows of x    N outputs    K inputs    C chunks of PANELS * 64 inputs

A tile has 64 rows of W for each of its PIECES: one; two of a gate and its ups; or the two halves of a head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.device import is_hopper, processors
from kernels.linear.gluon_common import (
    NO_POOL,
    added_lines,
    angles_of,
    descriptor,
    flattened,
    parts_at_once,
    pool_arguments,
    store_lines,
    store_rotated,
    unflattened,
)
from kernels.linear.split_k import workspace
from kernels.operands import Norm


@gluon.jit
def _fetch_weights(w, buffers, full, stage, tile, chunk, N, GATED: gl.constexpr, PIECES: gl.constexpr,
                   PANELS: gl.constexpr):  # fmt: skip
    """Load the tile's rows of W for one chunk."""
    for piece in gl.static_range(PIECES):
        row = tile * 64 + piece * N if GATED else (tile * PIECES + piece) * 64
        for panel in gl.static_range(PANELS):
            place = buffers.index((stage * PIECES + piece) * PANELS + panel)
            tma.async_copy_global_to_shared(w, [row, (chunk * PANELS + panel) * 64], full.index(stage), place)


@gluon.jit
def _fetch_rows(x, buffers, full, stage, chunk, PANELS: gl.constexpr):
    """Load the rows of x for one chunk."""
    for panel in gl.static_range(PANELS):
        column = (chunk * PANELS + panel) * 64
        tma.async_copy_global_to_shared(x, [0, column], full.index(stage), buffers.index(stage * PANELS + panel))


@gluon.jit
def _produce(x, w, x_buffers, w_buffers, full, empty, start, end, N, C, GATED: gl.constexpr, PIECES: gl.constexpr,
             PANELS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Producer: load chunks `start` to `end` of all tiles' chunks."""
    BYTES: gl.constexpr = PANELS * 128 * (PIECES * 64 + x_buffers.shape[1])
    first = gl.minimum(end, start + STAGES)
    for unit in range(start, first):
        mbarrier.expect(full.index(unit - start), BYTES)
        _fetch_weights(w, w_buffers, full, unit - start, unit // C, unit % C, N, GATED, PIECES, PANELS)
    gdc_wait()
    for unit in range(start, first):
        _fetch_rows(x, x_buffers, full, unit - start, unit % C, PANELS)
    for unit in range(first, end):
        count = unit - start
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_weights(w, w_buffers, full, stage, unit // C, unit % C, N, GATED, PIECES, PANELS)
        _fetch_rows(x, x_buffers, full, stage, unit % C, PANELS)


@gluon.jit
def _sum(x_buffers, w_buffers, full, empty, before, count, layout: gl.constexpr, PIECES: gl.constexpr,
         PANELS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The products of both pieces over `count` chunks. before: chunks that the program has completed."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    left = gl.zeros([64, BLOCK_M], gl.float32, layout)
    right = gl.zeros([64, BLOCK_M], gl.float32, layout)
    for chunk in range(before, before + count):
        stage = chunk % STAGES
        mbarrier.wait(full.index(stage), (chunk // STAGES) & 1)
        place = stage * PIECES * PANELS
        for panel in gl.static_range(PANELS):
            b = x_buffers.index(stage * PANELS + panel).permute([1, 0])
            left = warpgroup_mma(w_buffers.index(place + panel), b, left, is_async=True)
            if PIECES == 2:
                right = warpgroup_mma(w_buffers.index(place + PANELS + panel), b, right, is_async=True)
        if PIECES == 2:
            left, right = warpgroup_mma_wait(0, [left, right])
        else:
            left = warpgroup_mma_wait(0, [left])
        mbarrier.arrive(empty.index(stage), count=1)
    return left, right


@gluon.jit
def _normalized(left, right, low, high, eps, has_norm, half: gl.constexpr):
    """The halves of a head, [64, BLOCK_M] each, normalized if it has a norm, and rounded as by a separate kernel."""
    if has_norm:
        inverse = gl.rsqrt((gl.sum(left * left, 0) + gl.sum(right * right, 0)) / 128 + eps)[None, :]
        left = (left * inverse * low).to(half).to(gl.float32)
        right = (right * inverse * high).to(half).to(gl.float32)
    return left, right


@gluon.jit
def _consume(x_buffers, w_buffers, full, empty, bias, residual, out, qk_norm, eps, cos, sin, positions, kv,
             slot_mapping, parts, arrived, start, end, span, M, N, C, H, G, GATED: gl.constexpr, PIECES: gl.constexpr,
             PANELS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Consumer: compute the program's tiles, or its parts of them."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    SIZE: gl.constexpr = 64 * BLOCK_M
    AT_ONCE: gl.constexpr = parts_at_once(2 * BLOCK_M)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    lanes = gl.arange(0, 64, gl.SliceLayout(1, memory))
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, memory))
    half: gl.constexpr = out.dtype.element_ty
    for tile in range(start // C, (end + C - 1) // C):
        low, high = gl.maximum(start, tile * C), gl.minimum(end, tile * C + C)
        left, right = _sum(x_buffers, w_buffers, full, empty, low - start, high - low, layout, PIECES, PANELS, STAGES)
        # Inputs of the epilogue are loaded while the parts are joined.
        added = None
        if kv is not None:
            cosine, sine, page = angles_of(cos, sin, positions, slot_mapping, rows, lanes, M, 128)
            if qk_norm is not None:
                normed = qk_norm + gl.minimum(tile, H + G - 1) * 128 + lanes
                low, high = gl.load(normed).to(gl.float32)[:, None], gl.load(normed + 64).to(gl.float32)[:, None]
        elif bias is not None or residual is not None:
            added = added_lines(bias, residual, tile * 64 + lanes, rows, M, N)
        first, last = tile * C // span, (tile * C + C - 1) // span
        done = first == last or PARTS
        target = out
        if PARTS:
            target += (gl.program_id(0) - first) * M * N
        elif first < last:
            # Every program stores its part; the last to arrive adds all of them, always in the same order.
            worker = gl.program_id(0)
            place = parts + (worker * 2 + (worker == first).to(gl.int32)) * (SIZE * PIECES)
            flat = flattened(left)
            flat_layout: gl.constexpr = flat.type.layout
            offsets = gl.arange(0, SIZE, flat_layout)
            gl.store(place + offsets, flat)
            if PIECES == 2:
                gl.store(place + SIZE + offsets, flattened(right))
            gl.thread_barrier()
            done = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == last - first
            if done:
                gl.store(arrived + tile, 0)
                flat = gl.zeros([SIZE], gl.float32, flat_layout)
                flat_right = gl.zeros([SIZE], gl.float32, flat_layout)
                for begin in range(first, last + 1, AT_ONCE):
                    for which in gl.static_range(AT_ONCE):
                        other = begin + which
                        stored = parts + (other * 2 + (other == first).to(gl.int32)) * (SIZE * PIECES) + offsets
                        there = offsets < (last - other + 1) * SIZE
                        flat += gl.load(stored, mask=there, other=0.0, cache_modifier=".cg")
                        if PIECES == 2:
                            flat_right += gl.load(stored + SIZE, mask=there, other=0.0, cache_modifier=".cg")
                left = unflattened(flat, BLOCK_M, layout)
                right = unflattened(flat_right, BLOCK_M, layout)
        if done:
            if kv is not None:
                low_half, high_half = gl.convert_layout(left, memory), gl.convert_layout(right, memory)
                if bias is not None:
                    low_half += gl.load(bias + tile * 128 + lanes).to(gl.float32)[:, None]
                    high_half += gl.load(bias + tile * 128 + 64 + lanes).to(gl.float32)[:, None]
                if qk_norm is not None:
                    low_half, high_half = _normalized(low_half, high_half, low, high, eps, tile < H + G, half)
                store_rotated(
                    low_half, high_half, cosine, sine, page, None, kv, out, tile, rows, lanes, M, H, G, 128
                )  # fmt: skip
            else:
                if GATED:
                    left = left / (1.0 + gl.exp(-left)) * right
                store_lines(left, added, target, tile * 64 + lanes, rows, M, N, memory)


@gluon.jit(do_not_specialize=["M", "C", "span", "units"])  # a loop of C = 1 does not compile
def dense_hopper_kernel(
    x,  # descriptor of [M, K], boxes [BLOCK_M, 64]
    w,  # descriptor of [N, K] (GATED: [2N, K]), boxes [64, 64]
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]; where there is a pool: [M, H, 128]; PARTS: float32 [C / span, M, N]
    qk_norm,  # [H + G, 128] or None: of queries and keys
    eps,
    cos, sin,  # [positions, 128]; the first half of sin negated
    positions,  # int64 [M]
    kv,  # [blocks * P, 2G, 128] or None: W makes queries, keys and values, which are rotated; N = (H + 2G) * 128
    slot_mapping,  # int64 [M]: block * P + offset; a negative place is not written
    parts,  # float32 [programs, 2, PIECES, BLOCK_M, 64]
    arrived,  # int32 [tiles], zero between launches
    M, N, C, H, G, span, units,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, PIECES: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Program p computes chunks p * span to (p + 1) * span of the list of all tiles' chunks, C for each tile."""
    start = gl.program_id(0) * span
    end = gl.minimum(start + span, units)
    x_buffers = gl.allocate_shared_memory(x.dtype, [STAGES * PANELS, BLOCK_M, 64], x.layout)
    w_buffers = gl.allocate_shared_memory(w.dtype, [STAGES * PIECES * PANELS, 64, 64], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (x_buffers, w_buffers, full, empty, bias, residual, out, qk_norm, eps, cos, sin, positions, kv,
                        slot_mapping, parts, arrived, start, end, span, M, N, C, H, G, GATED, PIECES, PANELS, STAGES,
                        PARTS)),
            (_produce, (x, w, x_buffers, w_buffers, full, empty, start, end, N, C, GATED, PIECES, PANELS, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


# ---- shapes and launch ----


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the programs."""

    block_m: int
    """The most rows of x."""
    stages: int
    panels: int
    """Columns of a chunk, in units of 64."""


REGISTERS = 96
"""Registers per thread at launch, before the warps redistribute them: leaves room for the next kernel's program."""


LEAST_BUSY = 0.8
"""The share of the multiprocessors from which on programs have a tile, or an equal part of one, each: those that are
left over cost less than joining parts of tiles."""


def serves(x: Tensor) -> bool:
    """Whether this kernel supports these rows: 16-bit, on a Hopper, aligned for the copy engine."""
    fits = x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0 and x.storage_offset() % 8 == 0
    return fits and x.dtype.itemsize == 2 and is_hopper(x.device)


def shape_for(rows: int, n: int, k: int, gated: bool) -> Shape | None:
    """The shape for x [rows, k] times W [n, k], or None where the Triton kernel is as fast. Measured on one H200."""
    if rows > 8:
        return None
    if gated:
        return Shape(8, 6, 2) if n <= 8192 or k >= 8192 else None
    if k >= 4096 and n <= 2 * k:
        return Shape(8, 5, 4)
    return Shape(8, 4, 2) if n <= k <= 2048 else None


def rotated_shape_for(rows: int, dim: int) -> Shape | None:
    """The shape for the fused projection to queries, keys and values, or None."""
    if dim != 128 or rows > 32:
        return None
    return Shape(8, 6, 2) if rows <= 8 else Shape(16 if rows <= 16 else 32, 9, 1)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor, shape: Shape
) -> Tensor:
    """As `dense.linear`, of at least one row and at most `shape.block_m`."""
    _launch(x, weight, bias, residual, gated, out, shape, 2 if gated else 1, NO_POOL)
    return out


def parts(x: Tensor, weight: Tensor, shape: Shape) -> Tensor | None:
    """As `dense.parts`, of at least one row and at most `shape.block_m`."""
    n, k = weight.shape
    chunks, tiles, most = triton.cdiv(k, 64 * shape.panels), triton.cdiv(n, 64), processors(x.device)
    split = most // tiles
    if split == 0 or chunks % split or tiles * split < LEAST_BUSY * most:
        return None
    out = torch.empty(split, len(x), n, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, None, False, out, shape, 1, NO_POOL, split)
    return out


def rotated_qkv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, positions_M: Tensor, kv_NP2GD: Tensor,
    slot_mapping_M: Tensor, heads: int, shape: Shape, qk_norm: Norm | None = None,
) -> Tensor:  # fmt: skip
    """As `qkv_rope.rotated_qkv`, for head dimension 128."""
    out = torch.empty(x.shape[0], heads, 128, dtype=x.dtype, device=x.device)
    pool = pool_arguments(cos, sin, positions_M, kv_NP2GD, slot_mapping_M, heads)
    if qk_norm is not None:
        pool |= {"qk_norm": qk_norm.weight, "eps": qk_norm.eps}
    _launch(x, weight, bias, None, False, out, shape, 2, pool)
    return out


def _span(units: int, chunks: int, most: int) -> int:
    """Chunks of a program: an equal share of all, or a whole tile."""
    return chunks if LEAST_BUSY * most * chunks <= units <= most * chunks else triton.cdiv(units, most)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor, shape: Shape,
    pieces: int, pool: dict[str, Any], split: int = 0,
) -> None:  # fmt: skip
    (rows, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    chunks = triton.cdiv(k, 64 * shape.panels)
    units = triton.cdiv(n, 64 if gated else 64 * pieces) * chunks
    span = chunks // split if split else _span(units, chunks, processors(x.device))
    programs = triton.cdiv(units, span)
    space = workspace(x.device, programs * 2 * pieces * shape.block_m * 64)
    dense_hopper_kernel[(programs,)](
        x=descriptor(x, shape.block_m, 64), w=descriptor(weight, 64, 64), bias=bias, residual=residual, out=out,
        parts=space.parts, arrived=space.arrived, M=rows, N=n, C=chunks, span=span, units=units, GATED=gated,
        BLOCK_M=shape.block_m, PIECES=pieces, PANELS=shape.panels, STAGES=shape.stages, PARTS=split > 0,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=True, **({"qk_norm": None, "eps": 0.0} | pool),
    )  # fmt: skip
