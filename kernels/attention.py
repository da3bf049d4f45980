"""Ragged attention over paged keys and values: prefill chunks, decode rows and verification rows in one operation.

    T tokens of a step     H query heads      D head dimension    N blocks of the pool    G programs of the split kernel
    R rows of a step       K key/value heads  P tokens per block  B blocks of a table     M query rows of a tile

Two kernels share one inner loop (online softmax, Milakov and Gimelshein 2018; the H / K query heads of a key/value
head are packed into the rows of a tile). Rows of few tokens go to the split kernel: all their key tiles, laid end to
end, are cut into G equal shares, so a skewed batch costs what an even one costs; who finishes a row last merges its
parts. Longer rows go to the tile kernel, or its twin for Hopper, the longest tiles first. Grids depend on shapes alone
and all values are read on the device, so both can be captured in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass, replace
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import begin, launch_options

LOG2E = 1.4426950408889634
FLOOR = tl.constexpr(-1e30)  # below every score, yet finite: exp2(FLOOR - FLOOR) is 1 and not NaN


@triton.jit
def _attend(
    top, total, mixed,  # running maximum and sum [M], weighted values [M, D]
    q,  # [M, D]
    kv,  # [N, P, 2, K, D]
    table,  # int32 [B]
    newest,  # [M]: the last key that each query sees
    low, high, context, head, scale, window, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take keys low to high, in tiles. Unless MASKED, every query sees all of them."""
    lanes = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, TILE)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        keys = start + offsets
        if TILE <= P:
            page = tl.load(table + start // P).to(tl.int64) * P + start % P
            place = page + offsets
        else:
            page = tl.load(table + keys // P, mask=keys < context, other=0).to(tl.int64)
            place = page * P + keys % P
        source = kv + (place * 2 * K + head)[:, None] * D + lanes[None, :]
        here = (keys < context)[:, None]
        if D != BLOCK_D:
            k = tl.load(source, mask=here & (lanes < D)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(source, mask=here, other=0.0)
        else:
            k = tl.load(source)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        if MASKED:
            seen = keys[None, :] <= newest[:, None]
            if WINDOW:
                seen &= keys[None, :] > newest[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        # What lies behind the context may be anything, NaN too: never multiply by it, not even by zero.
        if D != BLOCK_D:
            v = tl.load(source + K * D, mask=here & (lanes < D)[None, :], other=0.0)
        elif MASKED:
            v = tl.load(source + K * D, mask=here, other=0.0)
        else:
            v = tl.load(source + K * D)
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=precision)
        top = new_top
    return top, total, mixed


@triton.jit
def _first_tile(context, length, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    if WINDOW:
        return tl.maximum(context - length + 1 - window, 0) // TILE
    return context * 0


@triton.jit(do_not_specialize=["R", "window"])
def schedule_kernel(
    starts,  # int32 [R + 1]: first token of each row
    contexts,  # int32 [R]
    ends,  # int32 [R + 1] out: tiles of all rows before, and of all
    records,  # int32 [G, 8] out: row, its first tile and last + 1, first token, tokens, context; share, stop
    R,
    K,
    window,
    longest,  # rows of more tokens belong to the tile kernel
    G: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lay the key tiles of all short rows end to end and find where each program's equal share begins."""
    begin(PDL)
    rows = tl.arange(0, BLOCK_R)
    start = tl.load(starts + rows, mask=rows < R, other=0)
    length = tl.load(starts + rows + 1, mask=rows < R, other=0) - start
    context = tl.load(contexts + rows, mask=rows < R, other=0)
    short = (length > 0) & (length <= longest)
    # A row without any context has one tile, all of it masked: its result is 0.
    tiles = tl.maximum(tl.cdiv(context, TILE) - _first_tile(context, length, window, TILE, WINDOW), 1)
    tiles = tl.where(short, tiles * K, 0)
    end = tl.cumsum(tiles, 0)
    tl.store(ends, 0)
    tl.store(ends + 1 + rows, end, mask=rows < R)
    share = tl.maximum(tl.cdiv(tl.sum(tiles), G), LEAST)
    for program in range(0, G, 16):
        members = program + tl.arange(0, 16)
        before = (end[None, :] <= (members * share)[:, None]) & (rows < R)[None, :]
        row = tl.sum(before.to(tl.int32), 1)
        here = rows[None, :] == row[:, None]
        record, known = records + members * 8, members < G
        tl.store(record, row, mask=known)
        tl.store(record + 1, tl.sum(tl.where(here, (end - tiles)[None, :], 0), 1), mask=known)
        tl.store(record + 2, tl.sum(tl.where(here, end[None, :], 0), 1), mask=known)
        tl.store(record + 3, tl.sum(tl.where(here, start[None, :], 0), 1), mask=known)
        tl.store(record + 4, tl.sum(tl.where(here, length[None, :], 0), 1), mask=known)
        tl.store(record + 5, tl.sum(tl.where(here, context[None, :], 0), 1), mask=known)
        tl.store(record + 6, share, mask=known)
        tl.store(record + 7, tl.minimum(members * share + share, tl.sum(tiles)), mask=known)


@triton.jit
def _merge(
    parts,  # [LINES] pointers into the first of `pieces` parts
    out,  # [LINES, 1] pointers
    pieces,
    valid,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LINES: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge a row's parts, MERGE at a time: one after the other would cost a trip to memory each."""
    lines = tl.arange(0, LINES)
    lanes = tl.arange(0, BLOCK_D)
    top = tl.full([LINES], FLOOR, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, BLOCK_D], tl.float32)
    for first in range(0, pieces, MERGE):
        which = first + tl.arange(0, MERGE)
        place = parts[None, :] + which[:, None] * (LINES * (D + 2))
        exists = (which < pieces)[:, None] & (lines < valid)[None, :]
        known = exists[:, :, None] & (lanes < D)[None, None, :]
        values = tl.load(place[:, :, None] + lanes[None, None, :], mask=known, other=0.0, cache_modifier=".cg")
        tops = tl.load(place + D, mask=exists, other=FLOOR, cache_modifier=".cg")
        totals = tl.load(place + D + 1, mask=exists, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        fade, rise = tl.exp2(top - new_top), tl.exp2(tops - new_top[None, :])
        mixed = mixed * fade[:, None] + tl.sum(values * rise[:, :, None], 0)
        total = total * fade + tl.sum(totals * rise, 0)
        top = new_top
    result = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + lanes[None, :], result, mask=(lines < valid)[:, None] & (lanes < D)[None, :])


@triton.jit(do_not_specialize=["R", "B", "window"])
def split_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, P, 2, K, D]
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    ends,  # int32 [R + 1]
    records,  # int32 [G, 8]
    parts,  # float32 [R * K + G, LINES, D + 2]: weighted values, maximum, sum
    arrived,  # int32 [R * K], zero between launches
    R, K, B, q_stride, scale, window,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    M: tl.constexpr, LINES: tl.constexpr, MERGE: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    program = tl.program_id(0)
    # One trip to memory says all about the first piece of work.
    record = records + program * 8
    row, row_begin, row_end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    start, length, context = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    share, stop = tl.load(record + 6), tl.load(record + 7)
    here = program * share
    lines = tl.arange(0, M)
    lanes = tl.arange(0, BLOCK_D)
    some = tl.arange(0, LINES)
    while here < stop:
        if here >= row_end:
            row += 1
            row_begin, row_end = row_end, tl.load(ends + row + 1)
            start, context = tl.load(starts + row), tl.load(contexts + row)
            length = tl.load(starts + row + 1) - start
        else:
            tiles = (row_end - row_begin) // K
            head = (here - row_begin) // tiles
            unit_begin = row_begin + head * tiles
            unit_stop = tl.minimum(unit_begin + tiles, stop)
            token = lines // SHARE
            valid = token < length
            line = (start + token).to(tl.int64)
            column = (head * SHARE + lines % SHARE) * D
            inside = valid[:, None] & (lanes < D)[None, :]
            query = tl.load(q + (line * q_stride + column)[:, None] + lanes[None, :], mask=inside, other=0.0)
            first = _first_tile(context, length, window, TILE, WINDOW)
            low = (first + here - unit_begin) * TILE
            high = tl.minimum((first + unit_stop - unit_begin) * TILE, context)
            top, total, mixed = _attend(
                tl.full([M], FLOOR, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32),
                query, kv, tables + row.to(tl.int64) * B, context - length + token,
                low, high, context, head, scale, window, K, D, BLOCK_D, P, TILE, True, WINDOW, IEEE, STAGES,
            )  # fmt: skip
            unit = row * K + head
            pieces = 1 + (unit_begin + tiles - 1) // share - unit_begin // share
            if pieces == 1:
                result = mixed / tl.where(total > 0, total, 1.0)[:, None]
                target = out + (line * (K * SHARE * D) + column)[:, None] + lanes[None, :]
                tl.store(target, result.to(out.dtype.element_ty), mask=inside)
            else:
                part = parts + (unit + program).to(tl.int64) * LINES * (D + 2) + lines * (D + 2)
                tl.store(part[:, None] + lanes[None, :], mixed, mask=inside)
                tl.store(part + D, top, mask=valid)
                tl.store(part + D + 1, total, mask=valid)
                tl.debug_barrier()  # All of the program's stores come before its arrival.
                if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == pieces - 1:
                    tl.store(arrived + unit, 0)
                    first_part = parts + (unit + unit_begin // share).to(tl.int64) * LINES * (D + 2) + some * (D + 2)
                    merged = (start + some // SHARE).to(tl.int64) * (K * SHARE * D) + (head * SHARE + some % SHARE) * D
                    _merge(first_part, out + merged[:, None], pieces, length * SHARE, D, BLOCK_D, LINES, MERGE)
            here = unit_stop


@triton.jit(do_not_specialize=["R", "B", "window", "longest"])
def tile_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, P, 2, K, D]
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    R, K, B, q_stride, scale, window, longest,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    M: tl.constexpr, BLOCK_R: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, head) computes M // SHARE tokens of one row of more than `longest` tokens."""
    begin(PDL)
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
    # The last tile of a row sees the most keys: take it first.
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
    newest = context - length + token
    oldest = context - length + tile * TOKENS  # position of the tile's first query
    beyond = tl.minimum(oldest + TOKENS, context)
    low = 0
    if WINDOW:
        low = tl.maximum(oldest + 1 - window, 0) // TILE * TILE
    middle = tl.maximum((oldest + 1) // TILE * TILE, low)  # all queries see every key before this one
    top = tl.full([M], FLOOR, tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, BLOCK_D], tl.float32)
    table = tables + row.to(tl.int64) * B
    if WINDOW:
        edge = tl.minimum(tl.maximum(tl.cdiv(beyond - window, TILE) * TILE, low), middle)
        top, total, mixed = _attend(
            top, total, mixed, query, kv, table, newest, low, edge, context, head, scale, window, K,
            D, BLOCK_D, P, TILE, True, WINDOW, IEEE, STAGES,
        )  # fmt: skip
        low = edge
    top, total, mixed = _attend(
        top, total, mixed, query, kv, table, newest, low, middle, context, head, scale, window, K,
        D, BLOCK_D, P, TILE, False, False, IEEE, STAGES,
    )  # fmt: skip
    top, total, mixed = _attend(
        top, total, mixed, query, kv, table, newest, middle, beyond, context, head, scale, window, K,
        D, BLOCK_D, P, TILE, True, WINDOW, IEEE, STAGES,
    )  # fmt: skip
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (line * (K * SHARE * D) + column)[:, None] + lanes[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


# ---- plan and launch ----


@dataclass(frozen=True, slots=True)
class Config:
    """Tile shapes of both kernels, chosen offline by `bench/kernels.py` on one H200."""

    split_keys: int = 64
    split_warps: int = 4
    split_stages: int = 5
    split_programs: int = 264
    """G: programs that share all short rows."""
    split_least: int = 1
    """Key tiles that are worth a program of their own."""
    tile_rows: int = 128
    tile_keys: int = 128
    tile_warps: int = 8
    tile_stages: int = 3
    hopper: bool = True
    """Leave the tiles to `kernels.attention_hopper` where it serves."""


# By head dimension, for few rows and for many: few rows are short of programs, and small tiles make more of them.
FEW_ROWS = 4
CONFIGS = {
    (64, True): Config(split_keys=32, split_warps=1, split_programs=264, tile_keys=64, tile_warps=4),
    (64, False): Config(split_keys=32, split_warps=1, split_programs=528, tile_keys=64, tile_warps=4),
    (128, True): Config(split_keys=32, split_warps=2, split_programs=264),
    (128, False): Config(),
}
EXACT = Config(split_keys=32, split_stages=2, tile_rows=32, tile_keys=32, tile_warps=4, tile_stages=2)
TINY = replace(EXACT, split_programs=3, split_least=1, split_keys=16, tile_keys=16)


def config_for(dim: int, dtype: torch.dtype, rows: int) -> Config:
    """The tile shapes for a head dimension, dtype and number of rows."""
    return EXACT if dtype == torch.float32 else CONFIGS[64 if dim <= 64 else 128, rows <= FEW_ROWS]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of one step see the pool; made once, used by all layers with the same window.

    The tensors may be changed in place between replays of a graph, followed by `schedule`.
    """

    starts: Tensor
    """int32 [R + 1]: the first token of each row, and T. Rows without tokens are skipped."""
    contexts: Tensor
    """int32 [R]: tokens that a row sees, its own of this step included."""
    tables: Tensor
    """int32 [R, B]: its blocks, in order."""
    ends: Tensor
    records: Tensor
    parts: Tensor
    arrived: Tensor
    window: int | None
    short_tokens: int
    """Rows of more tokens than this belong to the tile kernel."""
    long_tokens: int
    """At most this many tokens belong to such rows; 0 launches no tile kernel."""
    kv_heads: int
    share: int
    config: Config


def plan_attention(
    starts: Tensor,
    contexts: Tensor,
    tables: Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    short_tokens: int = 1,
    long_tokens: int = 0,
    config: Config | None = None,
) -> AttentionPlan:
    """Allocate a plan and schedule it. starts int32 [R + 1], contexts int32 [R], tables int32 [R, B], on the device.

    short_tokens: rows of up to this many tokens share the split kernel (1 for decode, k + 1 for verification).
    long_tokens: the tokens of longer rows, at most; 0 if there are none.
    """
    rows, device = contexts.shape[0], starts.device
    config = config or config_for(dim, dtype, rows)
    share = heads // kv_heads
    lines = triton.next_power_of_2(short_tokens * share)
    parts = (rows * kv_heads + config.split_programs, lines, dim + 2)
    plan = AttentionPlan(
        starts, contexts, tables,
        ends=torch.empty(rows + 1, dtype=torch.int32, device=device),
        records=torch.empty(config.split_programs, 8, dtype=torch.int32, device=device),
        parts=torch.empty(parts, dtype=torch.float32, device=device),
        arrived=torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        window=window, short_tokens=short_tokens, long_tokens=long_tokens, kv_heads=kv_heads, share=share,
        config=config,
    )  # fmt: skip
    schedule(plan)
    return plan


def schedule(plan: AttentionPlan) -> None:
    """Share the short rows' work out anew, after `starts` or `contexts` changed. One small launch; no host waits."""
    rows, config = plan.contexts.shape[0], plan.config
    schedule_kernel[(1,)](
        plan.starts, plan.contexts, plan.ends, plan.records, rows, plan.kv_heads, plan.window or 0,
        plan.short_tokens, G=config.split_programs, TILE=config.split_keys, LEAST=config.split_least,
        WINDOW=plan.window is not None, BLOCK_R=max(16, triton.next_power_of_2(rows)), num_warps=4,
        **launch_options(plan.starts.device),
    )  # fmt: skip


def attention(q_THD: Tensor, kv_NP2KD: Tensor, plan: AttentionPlan, scale: float, out: Tensor | None = None) -> Tensor:
    """softmax(q k^T * scale) v for each row over its own blocks, causal, grouped heads. -> [T, H * D].

    q_THD may have any token stride; its heads must be contiguous. A row with no context gives zeros.
    """
    tokens, heads, dim = q_THD.shape
    block_size, kv_heads = kv_NP2KD.shape[1], kv_NP2KD.shape[3]
    assert q_THD.stride()[1:] == (dim, 1)
    assert (kv_heads, heads) == (plan.kv_heads, plan.kv_heads * plan.share)
    if out is None:
        out = torch.empty(tokens, heads * dim, dtype=q_THD.dtype, device=q_THD.device)
    config, rows, stride = plan.config, plan.contexts.shape[0], q_THD.stride(0)
    fixed = {
        "SHARE": plan.share, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)), "P": block_size,
        "WINDOW": plan.window is not None, "IEEE": q_THD.dtype == torch.float32, **launch_options(q_THD.device),
    }  # fmt: skip
    ragged = (q_THD, kv_NP2KD, out, plan.starts, plan.contexts, plan.tables)
    numbers = (rows, kv_heads, plan.tables.shape[1], stride, scale * LOG2E, plan.window or 0)
    if plan.long_tokens:
        hopper = _hopper(q_THD, block_size, plan)
        tile_rows = hopper.ROWS if hopper else config.tile_rows
        tiles = min(plan.long_tokens // (plan.short_tokens + 1), rows)
        tiles += triton.cdiv(plan.long_tokens, tile_rows // plan.share)
        if hopper:
            hopper.attend_tiles(*ragged, tiles, scale * LOG2E, plan.window, plan.short_tokens)
        else:
            tile_kernel[(tiles * kv_heads,)](
                *ragged, *numbers, plan.short_tokens, TILE=config.tile_keys, M=config.tile_rows,
                BLOCK_R=max(16, triton.next_power_of_2(rows)), STAGES=config.tile_stages, num_warps=config.tile_warps,
                **fixed,
            )  # fmt: skip
    if plan.long_tokens < tokens:
        lines = plan.parts.shape[1]
        split_kernel[(config.split_programs,)](
            *ragged, plan.ends, plan.records, plan.parts, plan.arrived, *numbers, TILE=config.split_keys,
            M=max(16, lines), LINES=lines, MERGE=max(1, 64 // lines), STAGES=config.split_stages,
            num_warps=config.split_warps, **fixed,
        )  # fmt: skip
    return out


def _hopper(q_THD: Tensor, block_size: int, plan: AttentionPlan) -> ModuleType | None:
    """The module of the Hopper tile kernel where it can serve. It is imported late: older devices cannot use it."""
    if not launch_options(q_THD.device)["PDL"] or not plan.config.hopper:
        return None
    from kernels import attention_hopper

    served = attention_hopper.serves(q_THD.shape[2], q_THD.dtype, block_size, plan.share)
    return attention_hopper if served and torch.cuda.get_device_capability(q_THD.device)[0] == 9 else None
