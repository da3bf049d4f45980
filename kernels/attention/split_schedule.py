"""Device code that distributes the work of short rows over programs. Names as in `kernels.attention`; knows no keys.

Neighbouring rows whose block tables begin with the same blocks share these keys. `kernels.attention.shared_prefix`
computes them once for a group of rows; the work distributed here begins after them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.dependent_launch import wait_exclusive

RECORD = tl.constexpr(12)  # fields that describe a program's first piece of work
RECORDS = tl.constexpr(16)  # records that one program of `schedule_kernel` writes
DECODE_UNIT = tl.constexpr(16)  # keys of a unit of work of `decode_hopper`
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
    """For each row, the number of leading keys that it shares with others of its group; 0 if too few.

    unseen [BLOCK_R]: whole blocks before the row's first query. The members of a group are the rows whose tables hold
    the group's most frequent block at the end of the shortest useful prefix; their tables are then compared block by
    block to find the length of the prefix.
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


@triton.jit
def _pick(values, here):
    """The value of one row for each line of here [n, rows], which is true for that row alone."""
    return tl.sum(tl.where(here, values[None, :], 0), 1)


@triton.jit
def _cut(start, length, context, included, rows, CUT: tl.constexpr, BLOCK_V: tl.constexpr):
    """Cut the rows that are included into pieces of CUT tokens. -> for each of BLOCK_V pieces: row, first token,
    tokens (0: there is no such piece), context, and the first key that the row's tokens of this step write."""
    counts = tl.where(included, tl.cdiv(length, CUT), 0)
    after = tl.cumsum(counts, 0)
    piece = tl.arange(0, BLOCK_V)
    row = tl.sum((after[None, :] <= piece[:, None]).to(tl.int32), 1)
    here = rows[None, :] == row[:, None]
    before = _pick(after - counts, here)
    done = (piece - before) * CUT
    left = _pick(length, here) - done
    size = tl.where(piece < tl.sum(counts), tl.minimum(left, CUT), 0)
    old = _pick(context - length, here)
    return row, _pick(start, here) + done, size, old + done + size, old


@triton.jit(do_not_specialize=["R", "B", "window", "beyond"])
def schedule_kernel(
    starts,  # int32 [R + 1]: first token of each row
    contexts,  # int32 [R]
    tables,  # int32 [R, B]
    groups,  # int32 [cdiv(R, GROUP), 2 + GROUP] out, or None: number of shared keys, one row that shares them, and for
    # each row how many of the keys it shares: all or 0
    ends,  # int32 [R + 1] out: cumulative number of tiles before each row, and of all rows; None with CUT
    records,  # int32 [G, RECORD] out: row or piece, first and last tile of it, first token, tokens, context, tiles of a
    # share, end of the share, shared keys, begin of the share, row of the block table, first key of this step
    R,
    K,
    B,
    window,
    beyond,  # rows of up to so many tokens are not included
    longest,  # neither are rows of more tokens
    G: tl.constexpr,
    TILE: tl.constexpr,  # keys of a unit of work
    MIN_TILES: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # rows
    BY_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CUT: tl.constexpr,  # 0, or rows are cut into pieces of so many tokens, each of which is treated as a row
    BLOCK_V: tl.constexpr,  # most pieces
    AT_ONCE: tl.constexpr,  # programs of BY_HEAD that run at a time; where these are too few, two for each row and head
    PDL: tl.constexpr,
):
    """Form one list of the key tiles of the rows that are included and find where each program's equal share begins.

    BY_HEAD: each program computes tiles of one row and head. Every row then numbers its tiles from 0 and divides them
    equally among its own programs.

    No kernel may start before this one has ended (`wait_exclusive`), so that later kernels may read its output early.

    Each program reads all rows and writes RECORDS records; `ends` and `groups` are written by all with equal values.
    """
    wait_exclusive(PDL)
    rows = tl.arange(0, BLOCK_R)
    start = tl.load(starts + rows, mask=rows < R, other=0)
    length = tl.load(starts + rows + 1, mask=rows < R, other=0) - start
    context = tl.load(contexts + rows, mask=rows < R, other=0)
    short = (length > beyond) & (length <= longest)
    source, old = rows, context - length
    if CUT:
        source, start, length, context, old = _cut(start, length, context, short, rows, CUT, BLOCK_V)
        rows, short, R = tl.arange(0, BLOCK_V), length > 0, BLOCK_V
    shared = context * 0
    if groups is not None:
        shared = _find_shared_prefixes(tables, groups, R, B, (context - length) // P, short, P, TILE, GROUP, BLOCK_R)
    # A row without context has one tile, which is masked: its result is 0.
    skipped = first_tile(context, length, window, TILE, WINDOW) + shared // TILE
    tiles = tl.maximum(tl.cdiv(context, TILE) - skipped, 1)
    tiles = tl.where(short, tiles * K, 0)
    end = tl.cumsum(tiles, 0)
    if ends is not None:
        tl.store(ends, 0)
        tl.store(ends + 1 + rows, end, mask=rows < R)
    all_tiles = tl.sum(tiles)
    members = tl.program_id(0) * RECORDS + tl.arange(0, RECORDS)
    if BY_HEAD:
        # One program for each row and head; the others are distributed in proportion to the rows' tiles.
        heads = tl.sum(short.to(tl.int32)) * K
        spare = tl.maximum(AT_ONCE - heads, tl.minimum(heads, G - heads))
        wanted = 1 + tiles // K * spare // tl.maximum(all_tiles, 1)
        shares = tl.maximum(tl.cdiv(tiles // K, wanted), MIN_TILES)
        tiles = tl.cdiv(tiles // K, shares) * shares * K
        last = tl.cumsum(tiles // shares, 0)  # programs of all rows so far
        row = tl.sum(((last[None, :] <= members[:, None]) & (rows < R)[None, :]).to(tl.int32), 1)
    else:
        share = tl.maximum(tl.cdiv(all_tiles, G), MIN_TILES)
        row = tl.sum(((end[None, :] <= (members * share)[:, None]) & (rows < R)[None, :]).to(tl.int32), 1)
    here = rows[None, :] == row[:, None]
    row_tiles = _pick(tiles, here)
    if BY_HEAD:
        share = _pick(shares, here)
        row_tiles_end = row_tiles
        first = row_tiles - (_pick(last, here) - members) * share
        stop = tl.where(row < R, first + share, 0)
    else:
        row_tiles_end = _pick(end, here)
        first, stop = members * share, tl.minimum(members * share + share, all_tiles)
    record, known = records + members * RECORD, members < G
    tl.store(record, row, mask=known)
    tl.store(record + 1, row_tiles_end - row_tiles, mask=known)
    tl.store(record + 2, row_tiles_end, mask=known)
    tl.store(record + 3, _pick(start, here), mask=known)
    tl.store(record + 4, _pick(length, here), mask=known)
    tl.store(record + 5, _pick(context, here), mask=known)
    tl.store(record + 6, share, mask=known)
    tl.store(record + 7, stop, mask=known)
    tl.store(record + 8, _pick(shared, here), mask=known)
    tl.store(record + 9, first, mask=known)
    tl.store(record + 10, _pick(source, here), mask=known)
    tl.store(record + 11, _pick(old, here), mask=known)
