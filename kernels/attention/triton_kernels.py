"""Device code of `kernels.attention`: the inner loop, the kernel of short rows (split), the kernel of long rows (tile).

Names as in `kernels.attention`. With SPAN, each span of keys, [0, SPAN), [SPAN, 2 SPAN) and so on, has a partial result
of its own, and these are merged in order: the result's bits do not depend on which program computed a span.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.attention.decode_8bit import FLOOR, attend_8bit
from kernels.attention.scores import add_sinks, cap_scores
from kernels.attention.split_schedule import RECORD, first_tile
from kernels.dependent_launch import wait


@triton.jit
def attend(
    top, total, mixed,  # running maximum and sum [M], weighted values [M, D]
    q,  # [M, D]
    kv,  # [N, ROWS, 2, K, D]
    table,  # int32 [B]
    newest,  # [M]: the last key that each query sees
    low, high, context, head, scale, window, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, IEEE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Process keys low to high, in tiles. Unless MASKED, every query attends to all of them."""
    SCALED: tl.constexpr = kv.dtype.element_ty == tl.int8
    scales = kv.to(tl.pointer_type(tl.float32), bitcast=True) + head  # int8: after the values of each page
    lanes = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, TILE)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        keys = start + offsets
        if TILE <= P:
            page = tl.load(table + start // P).to(tl.int64)
            inner = start % P + offsets
        else:
            page = tl.load(table + keys // P, mask=keys < context, other=0).to(tl.int64)
            inner = keys % P
        place = page * ROWS + inner
        source = kv + (place * 2 * K + head)[:, None] * D + lanes[None, :]
        here = (keys < context)[:, None]
        if D != BLOCK_D:
            k = tl.load(source, mask=here & (lanes < D)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(source, mask=here, other=0.0)
        else:
            k = tl.load(source)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=precision) * scale
        if SCALED:
            beside = scales + (page * ROWS + P) * (K * D // 2) + inner * 2 * K
            scores *= tl.load(beside, mask=keys < context, other=0.0)[None, :]
        if CAP is not None:
            scores = cap_scores(scores, CAP)
        if MASKED:
            seen = keys[None, :] <= newest[:, None]
            if WINDOW:
                seen &= keys[None, :] > newest[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(beside + K, mask=keys < context, other=0.0)[None, :]
        weights = weights.to(q.dtype)
        # Memory after the context may hold anything, even NaN: never multiply by it, not even by zero.
        if D != BLOCK_D:
            v = tl.load(source + K * D, mask=here & (lanes < D)[None, :], other=0.0)
        elif MASKED:
            v = tl.load(source + K * D, mask=here, other=0.0)
        else:
            v = tl.load(source + K * D)
        mixed = tl.dot(weights, v.to(q.dtype), mixed * fade[:, None], input_precision=precision)
        top = new_top
    return top, total, mixed


@triton.jit
def prepare(query, kv, head_scales, head, K, scale):
    """The query in the dtype of its products with keys, the factor of its scores, the factor of its values."""
    if kv.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)  # e4m3 keys convert to float16 exactly and in one instruction instead of two
    gain = 1.0
    if head_scales is not None:
        scale *= tl.load(head_scales + head)
        gain = tl.load(head_scales + K + head)
    return query, scale, gain


@triton.jit
def _store_result(target, top, total, mixed, inside, sinks, heads):
    """Store weighted values divided by their sum; zeros for a row without keys. heads [M]: the rows' query heads."""
    if sinks is not None:
        total = add_sinks(top, total, sinks, heads)
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(target, result.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _join(top, total, mixed, its_top, its_total, its_mixed):
    """Merge two partial results. A span without visible keys changes nothing, not even in the last bit."""
    new_top = tl.maximum(top, its_top)
    fade, rise = tl.exp2(top - new_top), tl.exp2(its_top - new_top)
    return new_top, total * fade + its_total * rise, mixed * fade[:, None] + its_mixed * rise[:, None]


@triton.jit
def _merge_spans(
    parts,  # [LINES] pointers into the first of `pieces` parts
    out,  # [LINES, 1] pointers
    pieces,
    valid,
    sinks,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LINES: tl.constexpr,
    AHEAD: tl.constexpr,  # parts to fetch together
):
    """As `_merge`, but one span after the other, in the order of `tile_kernel`."""
    lines = tl.arange(0, LINES)
    lanes = tl.arange(0, BLOCK_D)
    top = tl.full([LINES], FLOOR, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, BLOCK_D], tl.float32)
    for first in range(0, pieces, AHEAD):
        for ahead in tl.static_range(AHEAD):
            place = parts + (first + ahead) * (LINES * (D + 2))
            exists = (lines < valid) & (first + ahead < pieces)
            known = exists[:, None] & (lanes < D)[None, :]
            its_mixed = tl.load(place[:, None] + lanes[None, :], mask=known, other=0.0, cache_modifier=".cg")
            its_top = tl.load(place + D, mask=exists, other=FLOOR, cache_modifier=".cg")
            its_total = tl.load(place + D + 1, mask=exists, other=0.0, cache_modifier=".cg")
            top, total, mixed = _join(top, total, mixed, its_top, its_total, its_mixed)
    inside = (lines < valid)[:, None] & (lanes < D)[None, :]
    _store_result(out + lanes[None, :], top, total, mixed, inside, sinks, heads)


@triton.jit
def _merge(
    parts,  # [LINES] pointers into the first of `pieces` parts
    pieces,
    valid,  # [LINES]
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge a row's partial results, MERGE at a time, so that their loads overlap."""
    LINES: tl.constexpr = parts.shape[0]
    lanes = tl.arange(0, BLOCK_D)
    top = tl.full([LINES], FLOOR, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, BLOCK_D], tl.float32)
    for first in range(0, pieces, MERGE):
        which = first + tl.arange(0, MERGE)
        place = parts[None, :] + which[:, None] * (LINES * (D + 2))
        exists = (which < pieces)[:, None] & valid[None, :]
        known = exists[:, :, None] & (lanes < D)[None, None, :]
        values = tl.load(place[:, :, None] + lanes[None, None, :], mask=known, other=0.0, cache_modifier=".cg")
        tops = tl.load(place + D, mask=exists, other=FLOOR, cache_modifier=".cg")
        totals = tl.load(place + D + 1, mask=exists, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        fade, rise = tl.exp2(top - new_top), tl.exp2(tops - new_top[None, :])
        mixed = mixed * fade[:, None] + tl.sum(values * rise[:, :, None], 0)
        total = total * fade + tl.sum(totals * rise, 0)
        top = new_top
    return top, total, mixed


@triton.jit
def _join_shared(
    top, total, mixed,  # of a row's own keys: [M], [M], [M, BLOCK_D]
    shared,  # keys that its group shares
    parts, first, valid,
    D: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the result of a row's own keys with that of the keys its group shares."""
    lines = tl.arange(0, top.shape[0])
    lanes = tl.arange(0, BLOCK_D)
    if shared > 0:
        for split in tl.static_range(SPLITS):
            place = parts + (first + split * GROUP).to(tl.int64) * LINES * (D + 2) + lines * (D + 2)
            known = valid[:, None] & (lanes < D)[None, :]
            its_mixed = tl.load(place[:, None] + lanes[None, :], mask=known, other=0.0)
            its_top = tl.load(place + D, mask=valid, other=FLOOR)
            its_total = tl.load(place + D + 1, mask=valid, other=0.0)
            top, total, mixed = _join(top, total, mixed, its_top, its_total, its_mixed)
    return top, total, mixed


@triton.jit
def _take(
    query, kv, head_scales, table, newest, low, high, context, head, scale, window, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, IEEE: tl.constexpr, TRANSPOSED: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Keys low to high of one row and head: maximum and sum [M], weighted values [M, BLOCK_D]."""
    query, factor, gain = prepare(query, kv, head_scales, head, K, scale)
    if TRANSPOSED:
        top, total, mixed = attend_8bit(
            tl.trans(query), kv, table, newest, low, high, context, head, factor, window, K, D, P, ROWS, TILE,
            WINDOW, CAP, IEEE, STAGES, ASM,
        )  # fmt: skip
    else:
        top, total, mixed = attend(
            tl.full([M], FLOOR, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32),
            query, kv, table, newest, low, high, context, head, factor, window, K, D, BLOCK_D, P, ROWS, TILE,
            True, WINDOW, CAP, IEEE, STAGES,
        )  # fmt: skip
    return top, total, mixed * gain


@triton.jit
def _finish(
    parts,  # the first of `pieces` parts
    pieces, out, start, length, head, groups, shared, shared_parts, before, sinks,
    K: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr,
    MERGE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge all partial results of a row and store the result; called by the program that arrives last."""
    lines = tl.arange(0, LINES)
    lanes = tl.arange(0, BLOCK_D)
    part = parts + lines * (D + 2)
    target = (
        out + ((start + lines // SHARE).to(tl.int64) * (K * SHARE * D) + (head * SHARE + lines % SHARE) * D)[:, None]
    )
    heads = head * SHARE + lines % SHARE
    if SPAN:
        _merge_spans(part, target, pieces, length * SHARE, sinks, heads, D, BLOCK_D, LINES, 4)
    else:
        valid = lines < length * SHARE
        top, total, mixed = _merge(part, pieces, valid, D, BLOCK_D, MERGE)
        if groups is not None:
            top, total, mixed = _join_shared(
                top, total, mixed, shared, shared_parts, before, valid, D, BLOCK_D, LINES, GROUP, SPLITS
            )
        inside = valid[:, None] & (lanes < D)[None, :]
        _store_result(target + lanes[None, :], top, total, mixed, inside, sinks, heads)


@triton.jit(do_not_specialize=["R", "B", "window"])
def split_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, ROWS, 2, K, D]
    head_scales,  # float32 [2, K] or None: 1
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    ends,  # int32 [R + 1]
    records,  # int32 [G, RECORD]
    groups,  # int32 [cdiv(R, GROUP), 2 + GROUP] or None, from `schedule_kernel`
    shared_parts,  # float32 [groups, K, SPLITS, GROUP, LINES, D + 2] or None: partial results of shared keys
    parts,  # float32 [R * K + G or units of work, LINES, D + 2]: weighted values, maximum, sum
    arrived,  # int32 [R * K], zero between launches
    sinks,  # float32 [H] or None
    R, K: tl.constexpr, B, q_stride, scale, window,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, LINES: tl.constexpr, MERGE: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, IEEE: tl.constexpr,
    TRANSPOSED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A unit of work is a tile of keys, and consecutive tiles are computed together; with SPAN it is one span."""
    UNIT: tl.constexpr = SPAN if SPAN else TILE
    wait(PDL)
    program = tl.program_id(0)
    # One memory access describes the first piece of work.
    record = records + program * RECORD
    row, row_begin, row_end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    start, length, context = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    share, stop, shared = tl.load(record + 6), tl.load(record + 7), tl.load(record + 8)
    here = tl.load(record + 9)
    lines = tl.arange(0, M)
    lanes = tl.arange(0, BLOCK_D)
    while here < stop:
        if here >= row_end:
            row += 1
            row_begin, row_end = row_end, tl.load(ends + row + 1)
            start, context = tl.load(starts + row), tl.load(contexts + row)
            length = tl.load(starts + row + 1) - start
            if groups is not None:
                shared = tl.load(groups + row // GROUP * (GROUP + 2) + 2 + row % GROUP)
        else:
            tiles = (row_end - row_begin) // K
            head = (here - row_begin) // tiles
            unit_begin = row_begin + head * tiles
            unit_stop = here + 1 if SPAN else tl.minimum(unit_begin + tiles, stop)
            token = lines // SHARE
            valid = token < length
            line = (start + token).to(tl.int64)
            column = (head * SHARE + lines % SHARE) * D
            inside = valid[:, None] & (lanes < D)[None, :]
            query = tl.load(q + (line * q_stride + column)[:, None] + lanes[None, :], mask=inside, other=0.0)
            first = first_tile(context, length, window, UNIT, WINDOW) + shared // UNIT
            low = (first + here - unit_begin) * UNIT
            high = tl.minimum((first + unit_stop - unit_begin) * UNIT, context)
            top, total, mixed = _take(
                query, kv, head_scales, tables + row.to(tl.int64) * B, context - length + token, low, high, context,
                head, scale, window, K, D, BLOCK_D, P, ROWS, TILE, M, WINDOW, CAP, IEEE, TRANSPOSED, STAGES, ASM,
            )  # fmt: skip
            unit = row * K + head
            if SPAN:
                pieces, place, first_place = tiles, here, unit_begin
            else:
                pieces = 1 + (unit_begin + tiles - 1) // share - unit_begin // share
                place = unit + program
                first_place = place + unit_begin // share - here // share
            before = (row // GROUP * K + head) * SPLITS * GROUP + row % GROUP  # the first of its shared parts
            if pieces == 1:
                if groups is not None:
                    top, total, mixed = _join_shared(
                        top, total, mixed, shared, shared_parts, before, valid, D, BLOCK_D, LINES, GROUP, SPLITS
                    )
                target = out + (line * (K * SHARE * D) + column)[:, None] + lanes[None, :]
                _store_result(target, top, total, mixed, inside, sinks, head * SHARE + lines % SHARE)
            else:
                part = parts + place.to(tl.int64) * LINES * (D + 2) + lines * (D + 2)
                tl.store(part[:, None] + lanes[None, :], mixed, mask=inside)
                tl.store(part + D, top, mask=valid)
                tl.store(part + D + 1, total, mask=valid)
                tl.debug_barrier()  # The program's stores precede its arrival.
                if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == pieces - 1:
                    tl.store(arrived + unit, 0)
                    _finish(
                        parts + first_place.to(tl.int64) * LINES * (D + 2), pieces, out, start, length, head,
                        groups, shared, shared_parts, before, sinks,
                        K, SHARE, D, BLOCK_D, LINES, MERGE, SPAN, GROUP, SPLITS,
                    )  # fmt: skip
            here = unit_stop


@triton.jit(do_not_specialize=["R", "B", "window", "longest"])
def tile_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, ROWS, 2, K, D]
    head_scales,  # float32 [2, K] or None: 1
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    sinks,  # float32 [H] or None
    R, K, B, q_stride, scale, window, longest,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, BLOCK_R: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, IEEE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, head) computes M // SHARE tokens of one row of more than `longest` tokens."""
    wait(PDL)
    TOKENS: tl.constexpr = M // SHARE
    rows = tl.arange(0, BLOCK_R)
    lengths = tl.load(starts + rows + 1, mask=rows < R, other=0) - tl.load(starts + rows, mask=rows < R, other=0)
    tiles = tl.where(lengths > longest, tl.cdiv(lengths, TOKENS), 0)
    end = tl.cumsum(tiles, 0)
    index = tl.program_id(0) // K
    if index >= tl.sum(tiles):
        return
    head = tl.program_id(0) % K
    row = tl.sum((end <= index).to(tl.int32))
    # The last tile of a row has the most keys: start it first.
    tile = tl.sum(tl.where(rows == row, end, 0)) - 1 - index
    start, context = tl.load(starts + row), tl.load(contexts + row)
    length = tl.load(starts + row + 1) - start
    lines = tl.arange(0, M)
    lanes = tl.arange(0, BLOCK_D)
    token = tile * TOKENS + lines // SHARE
    valid = (token < length) & (lines < TOKENS * SHARE)
    line = (start + token).to(tl.int64)
    column = (head * SHARE + lines % SHARE) * D
    inside = valid[:, None] & (lanes < D)[None, :]
    query = tl.load(q + (line * q_stride + column)[:, None] + lanes[None, :], mask=inside, other=0.0)
    query, factor, gain = prepare(query, kv, head_scales, head, K, scale)
    newest = context - length + token
    oldest = context - length + tile * TOKENS  # position of the tile's first query
    beyond = tl.minimum(oldest + TOKENS, context)
    top = tl.full([M], FLOOR, tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, BLOCK_D], tl.float32)
    table = tables + row.to(tl.int64) * B
    if SPAN:
        low = context * 0
        if WINDOW:
            low = tl.maximum(oldest + 1 - window, 0) // SPAN * SPAN
        for span in range(low, beyond, SPAN):
            its_top, its_total, its_mixed = attend(
                tl.full([M], FLOOR, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32),
                query, kv, table, newest, span, tl.minimum(span + SPAN, beyond), context, head, factor, window, K,
                D, BLOCK_D, P, ROWS, TILE, True, WINDOW, CAP, IEEE, STAGES,
            )  # fmt: skip
            top, total, mixed = _join(top, total, mixed, its_top, its_total, its_mixed * gain)
    else:
        low = 0
        if WINDOW:
            low = tl.maximum(oldest + 1 - window, 0) // TILE * TILE
        middle = tl.maximum((oldest + 1) // TILE * TILE, low)  # all queries attend to every key before this one
        if WINDOW:
            edge = tl.minimum(tl.maximum(tl.cdiv(beyond - window, TILE) * TILE, low), middle)
            top, total, mixed = attend(
                top, total, mixed, query, kv, table, newest, low, edge, context, head, factor, window, K,
                D, BLOCK_D, P, ROWS, TILE, True, WINDOW, CAP, IEEE, STAGES,
            )  # fmt: skip
            low = edge
        top, total, mixed = attend(
            top, total, mixed, query, kv, table, newest, low, middle, context, head, factor, window, K,
            D, BLOCK_D, P, ROWS, TILE, False, False, CAP, IEEE, STAGES,
        )  # fmt: skip
        top, total, mixed = attend(
            top, total, mixed, query, kv, table, newest, middle, beyond, context, head, factor, window, K,
            D, BLOCK_D, P, ROWS, TILE, True, WINDOW, CAP, IEEE, STAGES,
        )  # fmt: skip
        mixed *= gain
    target = out + (line * (K * SHARE * D) + column)[:, None] + lanes[None, :]
    _store_result(target, top, total, mixed, inside, sinks, head * SHARE + lines % SHARE)
