"""The tile kernel of `kernels.attention` for Hopper, in Gluon: one warp loads pages, two warpgroups multiply.

The bulk copy engine (TMA) loads the pages. A warpgroup issues the scores of the next tile and the values of this one
together and computes exponentials while the tensor cores work (Shah et al. 2024, FlashAttention-3). e4m3 pages go to a
ring buffer of their own, from which a third warpgroup converts them to float16. The rows, and the keys of earlier
steps, are read before the previous kernel has ended. Names as in `kernels.attention`. 16-bit dtypes, D = 64 or 128,
blocks of a multiple of 16 tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.kv_pages import FP8

ROWS, TILE, STAGES, RING, PAGE = 128, 128, 2, 3, 16


@gluon.jit
def _fetch(pool, table, buffers, full, empty, tile, count, context, column,
           P: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Producer: load a tile of keys or values, the count-th into these buffers."""
    STAGES: gl.constexpr = buffers.shape[0]
    TILE: gl.constexpr = buffers.shape[1]
    D: gl.constexpr = buffers.shape[2]
    BOX: gl.constexpr = pool.block_type.shape[1]
    PANELS: gl.constexpr = D // BOX
    PAGES: gl.constexpr = TILE // PAGE
    stage = count % STAGES
    pages = buffers._reinterpret(buffers.dtype, [STAGES * PANELS * PAGES, PAGE, BOX], pool.layout)
    mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), TILE * D * (buffers.dtype.primitive_bitwidth // 8))
    for page in gl.static_range(PAGES):
        key = tile * TILE + page * PAGE
        block = gl.load(table + key // P, mask=key < context, other=0)
        for panel in gl.static_range(PANELS):
            place = pages.index(stage * PANELS * PAGES + panel * PAGES + page)
            tma.async_copy_global_to_shared(pool, [block * P + key % P, column + panel * BOX], full.index(stage), place)


@gluon.jit
def _produce(pool, table, buffers, first, tiles, old, context, head, K,
             P: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Producer of 16-bit pages. old: number of keys that the previous kernel does not write."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    D: gl.constexpr = k_buffers.shape[2]
    TILE: gl.constexpr = k_buffers.shape[1]
    for count in range(tiles):
        if (first + count + 1) * TILE > old:
            gdc_wait()
        _fetch(pool, table, k_buffers, k_full, k_empty, first + count, count, context, head * D, P, PAGE)
        _fetch(pool, table, v_buffers, v_full, v_empty, first + count, count, context, (K + head) * D, P, PAGE)


@gluon.jit
def _produce_8bit(pool, table, raw, full, empty, first, tiles, old, context, head, K,
                    P: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Producer of 8-bit pages: keys and values alternate in one ring buffer."""
    D: gl.constexpr = raw.shape[2]
    TILE: gl.constexpr = raw.shape[1]
    for count in range(2 * tiles):
        if (first + count // 2 + 1) * TILE > old:
            gdc_wait()
        column = (head + count % 2 * K) * D
        _fetch(pool, table, raw, full, empty, first + count // 2, count, context, column, P, PAGE)


@gluon.jit
def _convert(raw, raw_full, raw_empty, count, buffers, full, empty, turn):
    """Convert one tile from 8 bits to 16: the count-th of the ring, the turn-th of its kind (keys or values)."""
    RING: gl.constexpr = raw.shape[0]
    STAGES: gl.constexpr = buffers.shape[0]
    TILE: gl.constexpr = buffers.shape[1]
    D: gl.constexpr = buffers.shape[2]
    LINES: gl.constexpr = 32  # the most that a thread's registers hold
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    place, stage = count % RING, turn % STAGES
    mbarrier.wait(raw_full.index(place), (count // RING) & 1)
    mbarrier.wait(empty.index(stage), (turn // STAGES + 1) & 1)
    for line in gl.static_range(0, TILE, LINES):
        found = raw.index(place).slice(line, LINES).load(layout)
        buffers.index(stage).slice(line, LINES).store(found.to(buffers.dtype))
    fence_async_shared()
    gl.thread_barrier()  # one arrival is counted for all threads
    mbarrier.arrive(raw_empty.index(place), count=1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _convert_all(raw, raw_full, raw_empty, buffers, tiles):
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    for count in range(tiles):
        _convert(raw, raw_full, raw_empty, 2 * count, k_buffers, k_full, k_empty, count)
        _convert(raw, raw_full, raw_empty, 2 * count + 1, v_buffers, v_full, v_empty, count)


@gluon.jit
def _online_softmax(scores, top, total, keys, newest, whole, scale, window, WINDOW: gl.constexpr):
    """Online softmax of one tile: weights, new maximum, new sum, and the factor for earlier values."""
    scores = scores * scale
    if not whole:
        seen = keys[None, :] <= newest[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > newest[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return weights, new_top, total * fade + gl.sum(weights, 1), fade


@gluon.jit
def _consume(q, out, q_buffer, buffers, numbers, half: gl.constexpr, SHARE: gl.constexpr, WINDOW: gl.constexpr):
    """Consumer: compute 64 of the program's rows, half 0 or 1."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    first, tiles, start, length, context, tile, head, K, q_stride, scale, gain, window = numbers
    STAGES: gl.constexpr = k_buffers.shape[0]
    ROWS: gl.constexpr = q_buffer.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    D: gl.constexpr = k_buffers.shape[2]
    TOKENS: gl.constexpr = 2 * ROWS // SHARE
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    memory_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])

    lines = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, memory_layout))
    lanes = gl.arange(0, D, gl.SliceLayout(0, memory_layout))
    token = tile * TOKENS + lines // SHARE
    inside = ((token < length) & (lines < TOKENS * SHARE))[:, None] & (lanes < D)[None, :]
    column = (head * SHARE + lines % SHARE) * D
    line = (start + token).to(gl.int64)
    gdc_wait()
    queries = gl.load(q + (line * q_stride + column)[:, None] + lanes[None, :], mask=inside, other=0.0)
    q_buffer.store(queries.to(q_buffer.dtype))
    fence_async_shared()

    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    newest = context - length + tile * TOKENS + rows // SHARE
    oldest = context - length + tile * TOKENS
    keys = gl.arange(0, TILE, gl.SliceLayout(0, score_layout))
    top = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, score_layout))
    mixed = gl.zeros([ROWS, D], gl.float32, value_layout)
    nothing = gl.zeros([ROWS, TILE], gl.float32, score_layout)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q_buffer, k_buffers.index(0).permute([1, 0]), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_empty.index(0), count=1)
    whole = (not WINDOW) & ((first + 1) * TILE <= oldest + 1)
    weights, top, total, fade = _online_softmax(
        scores, top, total, first * TILE + keys, newest, whole, scale, window, WINDOW
    )
    ready = gl.convert_layout(weights.to(q_buffer.dtype), weight_layout)
    for count in range(1, tiles):
        stage, before = count % STAGES, (count - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        k = k_buffers.index(stage).permute([1, 0])
        scores = warpgroup_mma(q_buffer, k, nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        mixed = warpgroup_mma(ready, v_buffers.index(before), mixed, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        whole = (not WINDOW) & ((first + count + 1) * TILE <= oldest + 1)
        weights, top, total, fade = _online_softmax(
            scores, top, total, (first + count) * TILE + keys, newest, whole, scale, window, WINDOW
        )
        mixed = warpgroup_mma_wait(0, [mixed])
        mbarrier.arrive(v_empty.index(before), count=1)
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, value_layout))[:, None]
        ready = gl.convert_layout(weights.to(q_buffer.dtype), weight_layout)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    v = v_buffers.index(last)
    if context < (first + tiles) * TILE:
        # Memory after the context may hold anything, even NaN. Both warpgroups write the same zeros.
        places = (first + tiles - 1) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, memory_layout))
        v.store(gl.where((places < context)[:, None], v.load(memory_layout), 0.0))
        fence_async_shared()
    mixed = warpgroup_mma(ready, v, mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, [mixed])
    total = gl.convert_layout(total, gl.SliceLayout(1, value_layout))
    result = (mixed * (gain / gl.where(total > 0, total, 1.0))[:, None]).to(out.dtype.element_ty)
    result = gl.convert_layout(result, memory_layout)
    gl.store(out + (line * (K * SHARE * D) + column)[:, None] + lanes[None, :], result, mask=inside)


@gluon.jit(do_not_specialize=["R", "B", "window", "longest"])
def prefill_hopper_kernel(
    pool,  # descriptor of [N * P, 2 * K * D], boxes of PAGE lines and 128 bytes or D numbers
    head_scales,  # float32 [2, K] or None: 1
    q,  # [T, H, D], tokens q_stride apart
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    R, K, B, q_stride, scale, window, longest,
    SHARE: gl.constexpr, D: gl.constexpr, P: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, BLOCK_R: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """As `tile_kernel`: program (tile, head) computes ROWS // SHARE tokens of one row."""
    TOKENS: gl.constexpr = ROWS // SHARE
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gdc_launch_dependents()
    rows = gl.arange(0, BLOCK_R, flat)
    lengths = gl.load(starts + rows + 1, mask=rows < R, other=0) - gl.load(starts + rows, mask=rows < R, other=0)
    tiles = gl.where(lengths > longest, (lengths + TOKENS - 1) // TOKENS, 0)
    end = gl.associative_scan(tiles, 0, _add)
    index = gl.program_id(0) // K
    if index < gl.sum(tiles, 0):
        head = gl.program_id(0) % K
        row = gl.sum((end <= index).to(gl.int32), 0)
        tile = gl.sum(gl.where(rows == row, end, 0), 0) - 1 - index
        start, context = gl.load(starts + row), gl.load(contexts + row)
        length = gl.load(starts + row + 1) - start
        oldest = context - length + tile * TOKENS
        first = 0
        if WINDOW:
            first = gl.maximum(oldest + 1 - window, 0) // TILE
        # At least one tile, even if it is masked: without any, the warps would wait for each other forever.
        count = gl.maximum((gl.minimum(oldest + TOKENS, context) + TILE - 1) // TILE - first, 1)

        gain = 1.0
        if head_scales is not None:
            scale *= gl.load(head_scales + head)
            gain = gl.load(head_scales + K + head)
        EIGHT_BIT: gl.constexpr = pool.dtype.primitive_bitwidth == 8
        kind: gl.constexpr = gl.float16 if EIGHT_BIT else pool.dtype  # e4m3 becomes float16 in one instruction
        wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], kind)
        q_wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, D], kind)
        q_buffers = gl.allocate_shared_memory(kind, [2, ROWS // 2, D], q_wide)
        k_buffers = gl.allocate_shared_memory(kind, [STAGES, TILE, D], wide)
        v_buffers = gl.allocate_shared_memory(kind, [STAGES, TILE, D], wide)
        k_full, v_full = _barriers(STAGES, 1), _barriers(STAGES, 1)
        k_empty, v_empty = _barriers(STAGES, 2), _barriers(STAGES, 2)  # both warpgroups
        table = tables + row.to(gl.int64) * B
        buffers = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty)
        numbers = (first, count, start, length, context, tile, head, K, q_stride, scale, gain, window)
        if EIGHT_BIT:
            narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], pool.dtype)
            raw = gl.allocate_shared_memory(pool.dtype, [RING, TILE, D], narrow)
            raw_full, raw_empty = _barriers(RING, 1), _barriers(RING, 1)
            fence_async_shared()
            gl.warp_specialize(
                [
                    (_consume, (q, out, q_buffers.index(0), buffers, numbers, 0, SHARE, WINDOW)),
                    (_consume, (q, out, q_buffers.index(1), buffers, numbers, 1, SHARE, WINDOW)),
                    (_convert_all, (raw, raw_full, raw_empty, buffers, count)),
                    (_produce_8bit, (pool, table, raw, raw_full, raw_empty, first, count, context - length,
                                       context, head, K, P, PAGE)),
                ],
                [4, 4, 1],
                [208, 72, 24],
            )  # fmt: skip
        else:
            fence_async_shared()
            gl.warp_specialize(
                [
                    (_consume, (q, out, q_buffers.index(0), buffers, numbers, 0, SHARE, WINDOW)),
                    (_consume, (q, out, q_buffers.index(1), buffers, numbers, 1, SHARE, WINDOW)),
                    (_produce, (pool, table, buffers, first, count, context - length, context, head, K, P, PAGE)),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip
    else:
        gdc_wait()


@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(found.index(place), count=arrivals)
    return found


@gluon.jit
def _add(a, b):
    return a + b


_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}


def box(dtype: torch.dtype, dim: int) -> list[int]:
    """Shape of one bulk copy from a page, [lines, numbers]: at most 128 bytes of each line."""
    return [PAGE, min(dim, 128 // dtype.itemsize)]


@cache
def layout(dtype: torch.dtype, dim: int) -> Any:
    """The shared memory layout of a box."""
    return gl.NVMMASharedLayout.get_default_for(box(dtype, dim), _KINDS[dtype])


def serves(dim: int, dtype: torch.dtype, stored: torch.dtype, block_size: int, share: int) -> bool:
    """Whether this kernel supports these shapes and dtypes."""
    fits = dim in (64, 128) and block_size % PAGE == 0 and share <= ROWS
    return fits and dtype.itemsize == 2 and stored in (dtype, FP8)


def attend_tiles(
    q_THD: Tensor, kv_NP2KD: Tensor, kv_scales: Tensor | None, out: Tensor, starts: Tensor, contexts: Tensor,
    tables: Tensor, tiles: int, scale: float, window: int | None, longest: int,
) -> None:  # fmt: skip
    """Attention of all rows of more than `longest` tokens, which have at most `tiles` tiles. scale includes log2(e)."""
    blocks, block_size, _, kv_heads, dim = kv_NP2KD.shape
    rows = contexts.shape[0]
    stored = kv_NP2KD.dtype
    pool = TensorDescriptor.from_tensor(kv_NP2KD.view(blocks * block_size, -1), box(stored, dim), layout(stored, dim))
    prefill_hopper_kernel[(tiles * kv_heads,)](
        pool, kv_scales, q_THD, out, starts, contexts, tables, rows, kv_heads, tables.shape[1], q_THD.stride(0), scale,
        window or 0, longest, SHARE=q_THD.shape[1] // kv_heads, D=dim, P=block_size, ROWS=ROWS, TILE=TILE, PAGE=PAGE,
        STAGES=STAGES, RING=RING, BLOCK_R=max(128, triton.next_power_of_2(rows)), WINDOW=window is not None,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
