"""Device code of `kernels.attention` that shares out the work of short rows. Names as there; knows no keys.

Rows next to each other whose tables begin with the same blocks see the same keys there.
`kernels.attention.shared_prefix` takes those once for a group of rows, and what is shared out here begins behind them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.dependent_launch import wait_exclusive

RECORD = tl.constexpr(10)  # numbers that say all about a program's first piece of work
RECORDS = tl.constexpr(16)  # that one program of `schedule_kernel` makes
DECODE_UNIT = tl.constexpr(16)  # keys by which the programs of few rows on a Hopper share
MIN_MEMBERS, MIN_SHARED_TILES = (
    tl.constexpr(4),
    tl.constexpr(4),
)  # of a group and its keys that are worth taking together


@triton.jit
def first_tile(context, length, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    if WINDOW:
        return tl.maximum(context - length + 1 - window, 0) // TILE
    return context * 0


@triton.jit
def _find_shared_prefixes(
    tables, groups, R, B, unseen, short,
    P: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """For each row, the leading keys that it shares with others of its group; 0 where it is not worth it.

    unseen [BLOCK_R]: whole blocks before the row's first query. Those rows belong together whose blocks agree where the
    least worthwhile prefix ends, and most rows of the group say which; how far they agree is then looked up.
    """
    COUNT: tl.constexpr = BLOCK_R // GROUP
    AHEAD: tl.constexpr = 16
    PROBE: tl.constexpr = (MIN_SHARED_TILES * TILE + P - 1) // P - 1
    rows = tl.arange(0, BLOCK_R)
    mine = tables + rows.to(tl.int64) * B
    candidate = short & (unseen > PROBE) & (B > PROBE)
    probe = tl.reshape(tl.load(mine + PROBE, mask=candidate, other=-1), [COUNT, GROUP])
    alike = (probe[:, :, None] == probe[:, None, :]) & (probe >= 0)[:, :, None]
    votes = tl.sum(alike.to(tl.int32), 2)
    leader = tl.argmax(votes, 1)
    chosen = tl.sum(tl.where(tl.arange(0, GROUP)[None, :] == leader[:, None], probe, 0), 1)
    belongs = (probe == chosen[:, None]) & (probe >= 0)
    member = tl.reshape(belongs, [BLOCK_R])
    leader += tl.arange(0, COUNT) * GROUP
    bound = tl.min(tl.where(belongs, tl.reshape(tl.minimum(unseen, B), [COUNT, GROUP]), B), 1)
    bound = tl.where(tl.max(votes, 1) >= MIN_MEMBERS, bound, 0)
    leaders = tl.reshape(tl.broadcast_to(leader[:, None], [COUNT, GROUP]), [BLOCK_R])
    its = tables + leaders.to(tl.int64) * B
    first = 0
    while first < tl.max(bound, 0):
        blocks = first + tl.arange(0, AHEAD)
        known = member[:, None] & (blocks < B)[None, :]
        a = tl.load(mine[:, None] + blocks[None, :], mask=known, other=0)
        b = tl.load(its[:, None] + blocks[None, :], mask=known, other=0)
        differs = tl.min(tl.where(a != b, blocks[None, :], B), 1)
        bound = tl.minimum(bound, tl.min(tl.reshape(differs, [COUNT, GROUP]), 1))
        first += AHEAD
    tiles = bound * P // TILE
    keys = tl.where(tiles >= MIN_SHARED_TILES, tiles * TILE, 0)
    group = tl.arange(0, COUNT)
    tl.store(groups + (GROUP + 2) * group, keys, mask=group * GROUP < R)
    tl.store(groups + (GROUP + 2) * group + 1, leader, mask=group * GROUP < R)
    shared = tl.reshape(tl.where(belongs, keys[:, None], 0), [BLOCK_R])
    tl.store(groups + rows // GROUP * (GROUP + 2) + 2 + rows % GROUP, shared, mask=rows // GROUP * GROUP < R)
    return shared


@triton.jit(do_not_specialize=["R", "B", "window"])
def schedule_kernel(
    starts,  # int32 [R + 1]: first token of each row
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    groups,  # int32 [cdiv(R, GROUP), 2 + GROUP] out, or None: keys that rows of a group share, one of these rows, and
    # for each row how many of the keys are its own: all or 0
    ends,  # int32 [R + 1] out: tiles of all rows before, and of all
    records,  # int32 [G, RECORD] out: row, its tiles' begin and end, first token, tokens, context, share, stop, shared,
    # begin
    R,
    K,
    B,
    window,
    longest,  # rows of more tokens belong to the tile kernel
    G: tl.constexpr,
    TILE: tl.constexpr,  # keys of a unit of work
    MIN_TILES: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # rows
    BY_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lay the key tiles of all short rows end to end and find where each program's equal share begins.

    APART: programs take tiles of one row and head each. Every row then counts its tiles from 0, as many as its programs
    take, and their equal shares are its own.

    Nobody may begin before this has ended: all of it may be read early.

    Programs here know all rows and make RECORDS records each; what all of them write is the same.
    """
    wait_exclusive(PDL)
    rows = tl.arange(0, BLOCK_R)
    start = tl.load(starts + rows, mask=rows < R, other=0)
    length = tl.load(starts + rows + 1, mask=rows < R, other=0) - start
    context = tl.load(contexts + rows, mask=rows < R, other=0)
    short = (length > 0) & (length <= longest)
    shared = context * 0
    if groups is not None:
        shared = _find_shared_prefixes(tables, groups, R, B, (context - length) // P, short, P, TILE, GROUP, BLOCK_R)
    # A row without any context has one tile, all of it masked: its result is 0.
    skipped = first_tile(context, length, window, TILE, WINDOW) + shared // TILE
    tiles = tl.maximum(tl.cdiv(context, TILE) - skipped, 1)
    tiles = tl.where(short, tiles * K, 0)
    end = tl.cumsum(tiles, 0)
    tl.store(ends, 0)
    tl.store(ends + 1 + rows, end, mask=rows < R)
    all_tiles = tl.sum(tiles)
    members = tl.program_id(0) * RECORDS + tl.arange(0, RECORDS)
    if BY_HEAD:
        # One program for each row and head, and of the others as many as its part of all tiles allows.
        wanted = 1 + tiles // K * (G - R * K) // tl.maximum(all_tiles, 1)
        shares = tl.maximum(tl.cdiv(tiles // K, wanted), MIN_TILES)
        tiles = tl.cdiv(tiles // K, shares) * shares * K
        last = tl.cumsum(tiles // shares, 0)  # programs of all rows so far
        row = tl.sum(((last[None, :] <= members[:, None]) & (rows < R)[None, :]).to(tl.int32), 1)
    else:
        share = tl.maximum(tl.cdiv(all_tiles, G), MIN_TILES)
        row = tl.sum(((end[None, :] <= (members * share)[:, None]) & (rows < R)[None, :]).to(tl.int32), 1)
    here = rows[None, :] == row[:, None]
    row_tiles = tl.sum(tl.where(here, tiles[None, :], 0), 1)
    if BY_HEAD:
        share = tl.sum(tl.where(here, shares[None, :], 0), 1)
        row_tiles_end = row_tiles
        first = row_tiles - (tl.sum(tl.where(here, last[None, :], 0), 1) - members) * share
        stop = tl.where(row < R, first + share, 0)
    else:
        row_tiles_end = tl.sum(tl.where(here, end[None, :], 0), 1)
        first, stop = members * share, tl.minimum(members * share + share, all_tiles)
    record, known = records + members * RECORD, members < G
    tl.store(record, row, mask=known)
    tl.store(record + 1, row_tiles_end - row_tiles, mask=known)
    tl.store(record + 2, row_tiles_end, mask=known)
    tl.store(record + 3, tl.sum(tl.where(here, start[None, :], 0), 1), mask=known)
    tl.store(record + 4, tl.sum(tl.where(here, length[None, :], 0), 1), mask=known)
    tl.store(record + 5, tl.sum(tl.where(here, context[None, :], 0), 1), mask=known)
    tl.store(record + 6, share, mask=known)
    tl.store(record + 7, stop, mask=known)
    tl.store(record + 8, tl.sum(tl.where(here, shared[None, :], 0), 1), mask=known)
    tl.store(record + 9, first, mask=known)
