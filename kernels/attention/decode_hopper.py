"""Attention for few rows of few tokens on a Hopper, in Gluon, for low latency: a token, a token and its guesses, or the
pieces of longer rows.

A program works on keys of one row and head; keys are the rows of both products, as in `kernels.attention.decode_8bit`,
and the queries of all tokens of the row their columns: query c belongs to the row's token c // SHARE. It requests its
first tiles, except those with keys of this step, before the previous kernel has ended, using the records that
`schedule_kernel` wrote. The program that finishes a row and head last merges the partial results. Where these are
many, the last programs of the row and head wait for the others and merge the results of some queries each; programs
start in order of their number, so those that are waited for run. A piece is a row with the block table of the row that
it was cut from. Names as in `kernels.attention`. 16-bit dtypes over pools of the same dtype or of e4m3, D = 64 or 128.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.split_schedule import DECODE_UNIT, RECORD
from kernels.kv_pages import FP8

FEWEST_COLUMNS = gl.constexpr(8)  # of products that tensor cores compute
MERGERS = gl.constexpr(8)  # programs that merge many partial results of a row and head


# ---- a program's keys ----


@gluon.jit
def _prefetch(kv, table, first, high, head, K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr,
              WARPS: gl.constexpr):  # fmt: skip
    """Prefetch a tile's lines of 128 bytes into the L2 cache."""
    LINE: gl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    COUNT: gl.constexpr = max(1, D // LINE)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // COUNT, COUNT], [WARPS, 1], [1, 0])
    keys = gl.minimum(first + gl.arange(0, TILE, gl.SliceLayout(1, layout)), high - 1)
    numbers = gl.arange(0, COUNT, gl.SliceLayout(0, layout)) * LINE
    page = gl.load(table + keys // P).to(gl.int64)
    source = kv + ((page * P + keys % P) * (2 * K) + head)[:, None] * D + numbers[None, :]
    text: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,l", [source], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(text, "=r,l", [source + K * D], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _ask(kv, table, k_buffer, v_buffer, first, rows, lanes, high, old, head, K: gl.constexpr, P: gl.constexpr,
         WARPS: gl.constexpr):  # fmt: skip
    """Start the copies of a tile's keys and values; zeros from key `high` on."""
    TILE: gl.constexpr = k_buffer.shape[0]
    D: gl.constexpr = k_buffer.shape[1]
    keys = first + rows
    known = keys < high
    page = gl.load(table + keys // P, mask=known, other=0).to(gl.int64)
    source = kv + ((page * P + keys % P) * (2 * K) + head)[:, None] * D + lanes[None, :]
    if first + TILE > old:
        # The previous kernel writes the keys of this step: wait for it. The tile's others are prefetched into the L2.
        _prefetch(kv, table, first, high, head, K, D, P, TILE, WARPS)
        gdc_wait()
    async_copy.async_copy_global_to_shared(k_buffer, source, known[:, None])
    async_copy.async_copy_global_to_shared(v_buffer, source + K * D, known[:, None])


@gluon.jit
def _fetch_queries(source, q_buffer, count, q_stride, SHARE: gl.constexpr, WARPS: gl.constexpr):
    """Copy `count` queries to shared memory, padded with zeros."""
    D: gl.constexpr = q_buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])
    line = gl.arange(0, q_buffer.shape[0], gl.SliceLayout(1, layout))
    lane = gl.arange(0, D, gl.SliceLayout(0, layout))
    place = line // SHARE * q_stride + line % SHARE * D
    queries = gl.load(source + place[:, None] + lane[None, :], mask=(line < count)[:, None], other=0.0)
    q_buffer.store(queries.to(q_buffer.dtype))


@gluon.jit
def _take(top, sums, mixed, k_buffer, v_buffer, q_buffer, p_buffer, nothing, keys, ends, scale):
    """Process a tile that has arrived: maxima, sums by position and query, weighted values. ends: of one query or all,
    the first key that it does not see."""
    fence_async_shared()
    gl.thread_barrier()
    scores = warpgroup_mma(k_buffer, q_buffer.permute([1, 0]), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores]) * scale
    scores = gl.where(keys[:, None] < ends, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 0))
    weights = gl.exp2(scores - new_top[None, :])
    fade = gl.exp2(top - new_top)
    sums = sums * fade[None, :] + weights
    mixed = mixed * fade[None, :]
    p_buffer.permute([1, 0]).store(weights.to(p_buffer.dtype))
    fence_async_shared()
    gl.thread_barrier()
    mixed = warpgroup_mma(v_buffer.permute([1, 0]), p_buffer.permute([1, 0]), mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, [mixed])
    gl.thread_barrier()  # the buffers are filled again
    return new_top, sums, mixed


@gluon.jit
def _attend(q, kv, table, start, length, low, high, tiles, context, old, head, q_stride, scale, K: gl.constexpr,
            SHARE: gl.constexpr, D: gl.constexpr, P: gl.constexpr, LINES: gl.constexpr, TILE: gl.constexpr,
            STAGES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Keys low to high, of this step from `old` on: maxima [COLUMNS], sums [TILE, COLUMNS] by position in a tile,
    weighted values [D, COLUMNS]."""
    AHEAD: gl.constexpr = STAGES - 1
    COLUMNS: gl.constexpr = max(FEWEST_COLUMNS, LINES)
    stored: gl.constexpr = kv.dtype.element_ty
    EIGHT_BIT: gl.constexpr = stored.primitive_bitwidth == 8
    kind: gl.constexpr = gl.float16 if EIGHT_BIT else stored  # e4m3 becomes float16 in one instruction
    WIDE: gl.constexpr = 1 if EIGHT_BIT else STAGES
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], kind)
    q_wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, D], kind)
    p_wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, TILE], kind)
    k_buffers = gl.allocate_shared_memory(kind, [WIDE, TILE, D], wide)
    v_buffers = gl.allocate_shared_memory(kind, [WIDE, TILE, D], wide)
    q_buffer = gl.allocate_shared_memory(kind, [COLUMNS, D], q_wide)
    p_buffer = gl.allocate_shared_memory(kind, [COLUMNS, TILE], p_wide)
    k_found, v_found = k_buffers, v_buffers
    if EIGHT_BIT:
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], stored)
        k_found = gl.allocate_shared_memory(stored, [STAGES, TILE, D], narrow)
        v_found = gl.allocate_shared_memory(stored, [STAGES, TILE, D], narrow)

    EACH: gl.constexpr = 16 if EIGHT_BIT else 8
    memory: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // D, D // EACH], [WARPS, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, TILE, gl.SliceLayout(1, memory))
    lanes = gl.arange(0, D, gl.SliceLayout(0, memory))
    places = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    top = gl.full([COLUMNS], -1e30, gl.float32, gl.SliceLayout(0, layout))
    sums = gl.zeros([TILE, COLUMNS], gl.float32, layout)
    mixed = gl.zeros([D, COLUMNS], gl.float32, layout)
    nothing = gl.zeros([TILE, COLUMNS], gl.float32, layout)
    seen = context - length + 1  # keys that the row's first token sees
    ends = high
    if LINES > SHARE:
        ends = gl.minimum(seen + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)) // SHARE, high)[None, :]
    for step in range(tiles + AHEAD):
        if step < tiles:
            _ask(kv, table, k_found.index(step % STAGES), v_found.index(step % STAGES), low + step * TILE, rows, lanes,
                 high, old, head, K, P, WARPS)  # fmt: skip
        async_copy.commit_group()
        if step == AHEAD:
            gdc_wait()
            first = q + start.to(gl.int64) * q_stride + head * (SHARE * D)
            _fetch_queries(first, q_buffer, length * SHARE, q_stride, SHARE, WARPS)
        if step >= AHEAD:
            count = step - AHEAD
            stage = count % STAGES
            async_copy.wait_group(AHEAD)
            if EIGHT_BIT:
                gl.thread_barrier()
                k_buffers.index(0).store(k_found.index(stage).load(memory).to(kind))
                v_buffers.index(0).store(v_found.index(stage).load(memory).to(kind))
                stage = 0
            top, sums, mixed = _take(top, sums, mixed, k_buffers.index(stage), v_buffers.index(stage), q_buffer,
                                     p_buffer, nothing, low + count * TILE + places, ends, scale)  # fmt: skip
    return top, sums, mixed


# ---- parts ----


@gluon.constexpr_function
def _merge_layout(LINES, D, WARPS):
    """Layout of [MERGE, LINES, D] in which a thread holds the same elements of all parts."""
    each = min(4, max(1, LINES * D // (32 * WARPS)))
    lanes = min(32, D // each)
    across = D // (each * lanes)
    return gl.BlockedLayout([1, 1, each], [1, 32 // lanes, lanes], [1, WARPS // across, across], [2, 1, 0])


@gluon.jit
def _place(line, K: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr):
    """Where the result of a query is, from that of the row's and head's first one on."""
    return line // SHARE * (K * SHARE * D) + line % SHARE * D


@gluon.jit
def _merge(parts, pieces, target, count, K: gl.constexpr, SHARE: gl.constexpr, LINES: gl.constexpr, D: gl.constexpr,
           MERGE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Merge the consecutive partial results of a row and head, of `count` queries, and store the result."""
    SIZE: gl.constexpr = LINES * (D + 2)
    layout: gl.constexpr = _merge_layout(LINES, D, WARPS)
    of_parts: gl.constexpr = gl.SliceLayout(2, layout)
    of_sums: gl.constexpr = gl.SliceLayout(0, layout)
    of_lines: gl.constexpr = gl.SliceLayout(1, of_sums)
    which = gl.arange(0, MERGE, gl.SliceLayout(1, of_parts))
    line = gl.arange(0, LINES, gl.SliceLayout(0, of_parts))
    lane = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    top = gl.full([LINES], -1e30, gl.float32, of_lines)
    total = gl.zeros([LINES], gl.float32, of_lines)
    mixed = gl.zeros([LINES, D], gl.float32, of_sums)
    for first in range(0, pieces, MERGE):
        exists = ((first + which) < pieces)[:, None] & (line < count)[None, :]
        place = parts + ((first + which) * SIZE)[:, None]
        values = gl.load(
            (place + (line * D)[None, :])[:, :, None] + lane[None, :][:, None, :], mask=exists[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        tops = gl.load(place + (LINES * D + line)[None, :], mask=exists, other=-1e30, cache_modifier=".cg")
        totals = gl.load(place + (LINES * D + LINES + line)[None, :], mask=exists, other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.convert_layout(gl.max(tops, 0), of_lines))
        rise = gl.exp2(tops - gl.convert_layout(new_top, gl.SliceLayout(0, of_parts))[None, :])
        fade = gl.exp2(top - new_top)
        mixed = mixed * fade[:, None] + gl.sum(values * rise[:, :, None], 0)
        total = total * fade + gl.convert_layout(gl.sum(totals * rise, 0), of_lines)
        top = new_top
    lines = gl.arange(0, LINES, of_lines)
    lanes = gl.arange(0, D, gl.SliceLayout(0, of_sums))
    result = (mixed / gl.where(total > 0, total, 1.0)[:, None]).to(target.dtype.element_ty)
    gl.store(target + _place(lines, K, SHARE, D)[:, None] + lanes[None, :], result, mask=(lines < count)[:, None])


@gluon.jit
def _merge_in_turn(parts, arrived, seen, pieces, turn, target, count, K: gl.constexpr, SHARE: gl.constexpr,
                   LINES: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Wait for all partial results of a row and head, of which `seen` had arrived, and store the results of the queries
    turn, turn + MERGERS and so on. The last program to do so sets `arrived` back."""
    SIZE: gl.constexpr = LINES * (D + 2)
    MERGE: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])
    of_parts: gl.constexpr = gl.SliceLayout(1, layout)
    which = gl.arange(0, MERGE, of_parts)
    lanes = gl.arange(0, D, gl.SliceLayout(0, layout))
    while seen < pieces:
        seen = gl.atomic_add(arrived, 0, sem="acquire")
    gl.thread_barrier()
    for line in range(turn, count, MERGERS):
        top, total = -1e30, 0.0
        mixed = gl.zeros([D], gl.float32, gl.SliceLayout(0, layout))
        for first in range(0, pieces, MERGE):
            exists = first + which < pieces
            place = parts + (first + which) * SIZE
            values = gl.load(place[:, None] + line * D + lanes[None, :], mask=exists[:, None], other=0.0,
                             cache_modifier=".cg")  # fmt: skip
            tops = gl.load(place + LINES * D + line, mask=exists, other=-1e30, cache_modifier=".cg")
            totals = gl.load(place + LINES * (D + 1) + line, mask=exists, other=0.0, cache_modifier=".cg")
            new_top = gl.maximum(top, gl.max(tops, 0))
            rise = gl.exp2(tops - new_top)
            fade = gl.exp2(top - new_top)
            mixed = mixed * fade + gl.sum(values * rise[:, None], 0)
            total = total * fade + gl.sum(totals * rise, 0)
            top = new_top
        result = mixed / gl.where(total > 0, total, 1.0)
        gl.store(target + _place(line, K, SHARE, D) + lanes, result.to(target.dtype.element_ty))
    if gl.atomic_add(arrived, 1) == pieces + MERGERS - 1:
        gl.store(arrived, 0)


@gluon.jit
def _leave(top, total, mixed, parts, arrived, row, head, piece, pieces, target, count, K: gl.constexpr,
           SHARE: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Store the result of a row and head, or the program's partial result: weighted values, maxima, sums."""
    D: gl.constexpr = mixed.shape[0]
    layout: gl.constexpr = mixed.type.layout
    column = gl.arange(0, mixed.shape[1], gl.SliceLayout(0, layout))
    dims = gl.arange(0, D, gl.SliceLayout(1, layout))
    some = (column < count)[None, :]
    if pieces == 1:
        result = mixed / gl.where(total > 0, total, 1.0)[None, :]
        place = _place(column, K, SHARE, D)
        gl.store(target + dims[:, None] + place[None, :], result.to(target.dtype.element_ty), mask=some)
    else:
        SIZE: gl.constexpr = LINES * (D + 2)
        AT_ONCE: gl.constexpr = min(16, 128 // LINES)
        part = parts + gl.program_id(0) * SIZE
        gl.store(part + dims[:, None] + (column * D)[None, :], mixed, mask=some)
        gl.store(part + LINES * D + column, top, mask=column < count)
        gl.store(part + LINES * (D + 1) + column, total, mask=column < count)
        gl.thread_barrier()  # the program's stores precede its arrival
        before = gl.atomic_add(arrived + row * K + head, 1, sem="acq_rel")
        if pieces < max(AT_ONCE + 1, MERGERS) or LINES == 1:  # One program takes them at once.
            if before == pieces - 1:
                gl.store(arrived + row * K + head, 0)
                _merge(part - piece * SIZE, pieces, target, count, K, SHARE, LINES, D, AT_ONCE, WARPS)
        elif piece >= pieces - MERGERS:
            _merge_in_turn(
                part - piece * SIZE, arrived + row * K + head, before + 1, pieces, pieces - 1 - piece, target, count, K,
                SHARE, LINES, D, WARPS,
            )  # fmt: skip


# ---- kernel and launch ----


@gluon.jit(do_not_specialize=["B"])
def decode_hopper_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, P, 2, K, D]
    head_scales,  # float32 [2, K] or None: 1
    out,  # [T, H, D]
    tables,  # int32 [R, B]
    records,  # int32 [G, RECORD], from `schedule_kernel` with BY_HEAD
    parts,  # float32 [G, LINES * (D + 2)]: weighted values, maxima, sums
    arrived,  # int32 [R * K], zero between launches
    K: gl.constexpr, B, q_stride, scale,
    SHARE: gl.constexpr, D: gl.constexpr, P: gl.constexpr, LINES: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program p computes the keys of record p, in tiles."""
    record = records + gl.program_id(0) * RECORD
    row, units, start, length = gl.load(record), gl.load(record + 2), gl.load(record + 3), gl.load(record + 4)
    context, share, stop, here = gl.load(record + 5), gl.load(record + 6), gl.load(record + 7), gl.load(record + 9)
    source, old = gl.load(record + 10), gl.load(record + 11)
    gdc_launch_dependents()
    if here < stop:
        units = units // K
        head = here // units
        piece = (here - head * units) // share
        pieces = units // share
        low = piece * share * DECODE_UNIT
        high = gl.minimum(low + share * DECODE_UNIT, context)
        tiles = (gl.maximum(high - low, 0) + TILE - 1) // TILE
        table = tables + source.to(gl.int64) * B
        gain = 1.0
        if head_scales is not None:
            scale *= gl.load(head_scales + head)
            gain = gl.load(head_scales + K + head)
        top, sums, mixed = _attend(
            q, kv, table, start, length, low, high, tiles, context, old, head, q_stride, scale, K, SHARE, D, P, LINES,
            TILE, STAGES, WARPS,
        )  # fmt: skip
        gdc_wait()
        target = out + start.to(gl.int64) * (K * SHARE * D) + head * (SHARE * D)
        _leave(
            top, gl.sum(sums, 0), mixed * gain, parts, arrived, row, head, piece, pieces, target, length * SHARE, K,
            SHARE, LINES, WARPS,
        )  # fmt: skip
    else:
        gdc_wait()


def attend_decode(
    q_THD: Tensor, kv_NP2KD: Tensor, kv_scales: Tensor | None, out: Tensor, tables: Tensor, records: Tensor,
    parts: Tensor, arrived: Tensor, scale: float, keys: int, stages: int, warps: int,
) -> None:  # fmt: skip
    """Attention of all rows of up to LINES / SHARE tokens, in tiles of `keys` keys. scale includes log2(e)."""
    _, block_size, _, kv_heads, dim = kv_NP2KD.shape
    assert kv_NP2KD.dtype in (q_THD.dtype, FP8), kv_NP2KD.dtype
    decode_hopper_kernel[(len(records),)](
        q_THD, kv_NP2KD, kv_scales, out, tables, records, parts, arrived, kv_heads, tables.shape[1], q_THD.stride(0),
        scale, SHARE=q_THD.shape[1] // kv_heads, D=dim, P=block_size, LINES=parts.shape[1], TILE=keys, STAGES=stages,
        WARPS=warps, num_warps=warps, launch_pdl=True,
    )  # fmt: skip
