"""Ragged attention over paged keys and values: prefill chunks, decode rows and verification rows in one operation.

    T tokens of a step     H query heads      D head dimension    N blocks of the pool    G programs of the split kernel
    R rows of a step       K key/value heads  P tokens per block  B blocks of a table     M query rows of a tile

Two kernels share one inner loop (online softmax, Milakov and Gimelshein 2018; the H / K query heads of a key/value head
are packed into the rows of a tile). Rows of few tokens go to the split kernel: all their key tiles, laid end to end, are
cut into G equal shares, so a skewed batch costs what an even one costs; who finishes a row last merges its parts. Longer
rows go to the tile kernel, the longest tiles first. Grids depend on shapes alone and all values are read on the device,
so both can be captured in a CUDA graph.
"""

from dataclasses import dataclass, replace

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
    firsts,  # int32 [G] out: the row in which each program begins
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
    length = tl.load(starts + rows + 1, mask=rows < R, other=0) - tl.load(starts + rows, mask=rows < R, other=0)
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
        tl.store(firsts + members, tl.sum(before.to(tl.int32), 1), mask=members < G)


@triton.jit(do_not_specialize=["R", "B", "window"])
def split_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, P, 2, K, D]
    out,  # [T, H, D]
    starts,  # int32 [R + 1]
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    ends,  # int32 [R + 1]
    firsts,  # int32 [G]
    parts,  # float32 [R * K + G, M, D + 2]: weighted values, maximum, sum
    arrived,  # int32 [R * K], zero between launches
    R, K, B, q_stride, scale, window,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    M: tl.constexpr, G: tl.constexpr, LEAST: tl.constexpr, MERGE: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    program = tl.program_id(0)
    all_tiles = tl.load(ends + R)
    share = tl.maximum(tl.cdiv(all_tiles, G), LEAST)
    here = program * share
    stop = tl.minimum(here + share, all_tiles)
    row = tl.load(firsts + program)
    lines = tl.arange(0, M)
    lanes = tl.arange(0, BLOCK_D)
    while here < stop:
        row_begin, row_end = tl.load(ends + row), tl.load(ends + row + 1)
        if here >= row_end:
            row += 1
        else:
            tiles = (row_end - row_begin) // K
            head = (here - row_begin) // tiles
            unit_begin = row_begin + head * tiles
            unit_stop = tl.minimum(unit_begin + tiles, stop)
            start, context = tl.load(starts + row), tl.load(contexts + row)
            length = tl.load(starts + row + 1) - start
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
            last = pieces == 1
            if pieces > 1:
                part = parts + (unit + program).to(tl.int64) * M * (D + 2) + lines * (D + 2)
                tl.store(part[:, None] + lanes[None, :], mixed, mask=inside)
                tl.store(part + D, top, mask=valid)
                tl.store(part + D + 1, total, mask=valid)
                tl.debug_barrier()  # All of the program's stores come before its arrival.
                last = tl.atomic_add(arrived + unit, 1, sem="acq_rel") == pieces - 1
                if last:
                    tl.store(arrived + unit, 0)
                    top = tl.full([M], FLOOR, tl.float32)
                    total = tl.zeros([M], tl.float32)
                    mixed = tl.zeros([M, BLOCK_D], tl.float32)
                    # Several parts at a time: one after the other would cost a trip to memory each.
                    for other in range(0, pieces, MERGE):
                        which = other + tl.arange(0, MERGE)
                        some = parts + (unit + unit_begin // share + which).to(tl.int64) * M * (D + 2)
                        stats = some[:, None] + lines[None, :] * (D + 2)
                        exists = (which < pieces)[:, None] & valid[None, :]
                        values = tl.load(
                            stats[:, :, None] + lanes[None, None, :],
                            mask=exists[:, :, None] & (lanes < D)[None, None, :], other=0.0, cache_modifier=".cg",
                        )  # fmt: skip
                        tops = tl.load(stats + D, mask=exists, other=FLOOR, cache_modifier=".cg")
                        totals = tl.load(stats + D + 1, mask=exists, other=0.0, cache_modifier=".cg")
                        new_top = tl.maximum(top, tl.max(tops, 0))
                        fade, rise = tl.exp2(top - new_top), tl.exp2(tops - new_top[None, :])
                        mixed = mixed * fade[:, None] + tl.sum(values * rise[:, :, None], 0)
                        total = total * fade + tl.sum(totals * rise, 0)
                        top = new_top
            if last:
                result = mixed / tl.where(total > 0, total, 1.0)[:, None]
                target = out + (line * (K * SHARE * D) + column)[:, None] + lanes[None, :]
                tl.store(target, result.to(out.dtype.element_ty), mask=inside)
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
    split_stages: int = 3
    split_programs: int = 528
    """G: programs that share all short rows."""
    split_least: int = 2
    """Key tiles that are worth a program of their own."""
    tile_rows: int = 128
    tile_keys: int = 64
    tile_warps: int = 8
    tile_stages: int = 3


CONFIGS = {64: Config(), 128: Config()}
EXACT = Config(split_keys=32, split_stages=2, tile_rows=32, tile_keys=32, tile_warps=4, tile_stages=2)
TINY = replace(EXACT, split_programs=3, split_least=1, split_keys=16, tile_keys=16)


def config_for(dim: int, dtype: torch.dtype) -> Config:
    """The tile shapes for a head dimension and dtype."""
    return EXACT if dtype == torch.float32 else CONFIGS[64 if dim <= 64 else 128]


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
    firsts: Tensor
    parts: Tensor
    arrived: Tensor
    window: int | None
    split_rows: int
    """M of the split kernel; rows of more than M // (H / K) tokens belong to the tile kernel."""
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
    config = config or config_for(dim, dtype)
    share = heads // kv_heads
    split_rows = max(16, triton.next_power_of_2(short_tokens * share))
    parts = (rows * kv_heads + config.split_programs, split_rows, dim + 2)
    plan = AttentionPlan(
        starts, contexts, tables,
        ends=torch.empty(rows + 1, dtype=torch.int32, device=device),
        firsts=torch.empty(config.split_programs, dtype=torch.int32, device=device),
        parts=torch.empty(parts, dtype=torch.float32, device=device),
        arrived=torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        window=window, split_rows=split_rows, long_tokens=long_tokens, kv_heads=kv_heads, share=share, config=config,
    )  # fmt: skip
    schedule(plan)
    return plan


def schedule(plan: AttentionPlan) -> None:
    """Share the short rows' work out anew, after `starts` or `contexts` changed. One small launch; no host waits."""
    rows, config = plan.contexts.shape[0], plan.config
    schedule_kernel[(1,)](
        plan.starts, plan.contexts, plan.ends, plan.firsts, rows, plan.kv_heads, plan.window or 0,
        plan.split_rows // plan.share, G=config.split_programs, TILE=config.split_keys, LEAST=config.split_least,
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
    longest = plan.split_rows // plan.share
    ragged = (q_THD, kv_NP2KD, out, plan.starts, plan.contexts, plan.tables)
    numbers = (rows, kv_heads, plan.tables.shape[1], stride, scale * LOG2E, plan.window or 0)
    if plan.long_tokens:
        tiles = min(plan.long_tokens // (longest + 1), rows) + triton.cdiv(
            plan.long_tokens, config.tile_rows // plan.share
        )
        tile_kernel[(tiles * kv_heads,)](
            *ragged, *numbers, longest, TILE=config.tile_keys, M=config.tile_rows,
            BLOCK_R=max(16, triton.next_power_of_2(rows)), STAGES=config.tile_stages, num_warps=config.tile_warps,
            **fixed,
        )  # fmt: skip
    if plan.long_tokens < tokens:
        split_kernel[(config.split_programs,)](
            *ragged, plan.ends, plan.firsts, plan.parts, plan.arrived, *numbers, TILE=config.split_keys,
            M=plan.split_rows, G=config.split_programs, LEAST=config.split_least, MERGE=max(1, 128 // plan.split_rows),
            STAGES=config.split_stages, num_warps=config.split_warps, **fixed,
        )  # fmt: skip
    return out
