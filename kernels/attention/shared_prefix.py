"""Attention over keys that neighbouring rows share, computed once for a group of rows whose queries fill one tile.

The results are partial: `split_kernel` merges them with those of each row's own keys (two-level cascade attention, Ye
et al. 2025, FlashInfer). `kernels.attention.split_schedule` finds which rows share which keys. Names as in
`kernels.attention`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.attention.decode_8bit import FLOOR
from kernels.attention.triton_kernels import attend, prepare
from kernels.dependent_launch import wait


@triton.jit(do_not_specialize=["R", "B"])
def shared_prefix_kernel(
    q,  # [T, H, D], tokens q_stride apart
    kv,  # [N, ROWS, 2, K, D]
    head_scales,  # float32 [2, K] or None: 1
    starts,  # int32 [R + 1]
    tables,  # int32 [R, B]
    groups,  # int32 [cdiv(R, GROUP), 2 + GROUP]: first the number of keys and the row whose block table is read
    parts,  # float32 [groups, K, SPLITS, GROUP, LINES, D + 2] out: weighted values, maximum, sum
    R, K, B, q_stride, scale,
    SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, SPLITS: tl.constexpr, CAP: tl.constexpr,
    IEEE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (group, head, split) computes a SPLITS-th of a group's keys for all its rows of one token."""
    M: tl.constexpr = GROUP * LINES
    wait(PDL)
    group = tl.program_id(0) // (K * SPLITS)
    context = tl.load(groups + (GROUP + 2) * group)
    leader = tl.load(groups + (GROUP + 2) * group + 1)
    if context == 0:
        return
    head, split = tl.program_id(0) // SPLITS % K, tl.program_id(0) % SPLITS
    lines = tl.arange(0, M)
    lanes = tl.arange(0, BLOCK_D)
    row = group * GROUP + lines // LINES
    start = tl.load(starts + row, mask=row < R, other=0)
    length = tl.load(starts + row + 1, mask=row < R, other=0) - start
    valid = (length == 1) & (lines % LINES < SHARE)
    column = (head * SHARE + lines % LINES) * D
    inside = valid[:, None] & (lanes < D)[None, :]
    query = tl.load(q + (start.to(tl.int64) * q_stride + column)[:, None] + lanes[None, :], mask=inside, other=0.0)
    query, factor, gain = prepare(query, kv, head_scales, head, K, scale)
    span = tl.cdiv(context // TILE, SPLITS) * TILE
    low = split * span
    top, total, mixed = attend(
        tl.full([M], FLOOR, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32),
        query, kv, tables + leader.to(tl.int64) * B, lines, low, tl.minimum(low + span, context), context, head,
        factor, 0, K, D, BLOCK_D, P, ROWS, TILE, False, False, CAP, IEEE, STAGES,
    )  # fmt: skip
    part = parts + (tl.program_id(0).to(tl.int64) * M + lines) * (D + 2)
    tl.store(part[:, None] + lanes[None, :], mixed * gain, mask=inside)
    tl.store(part + D, top, mask=valid)
    tl.store(part + D + 1, total, mask=valid)
