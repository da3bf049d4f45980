"""Ragged attention over paged keys and values: prefill chunks, decode rows and verification rows in one operation.

    T tokens of a step     H query heads      D head dimension    N blocks of the pool    G programs of the split kernel
    R rows of a step       K key/value heads  P tokens per block  B blocks of a table     M query rows of a tile

Two kernels share one inner loop (online softmax, Milakov and Gimelshein 2018; the H / K query heads of a key/value
head are packed into the rows of a tile):

- The split kernel serves rows of few tokens (decode). The key tiles of all rows form one list, which is cut into G
  equal shares, so a batch of uneven contexts costs what an even one costs. The program that finishes a row last merges
  the row's partial results. With few rows, each program works on one row and head (`split_by_head`).
- The tile kernel serves longer rows (prefill), the tiles with the most keys first.

Three kernels replace them where they are faster: `decode_hopper` (few short rows, and longer ones that are cut into
pieces, Hopper), `prefill_hopper` (the tile kernel for Hopper) and `short_prefill` (steps whose rows all see at most 128
keys; it has a plan of its own).
`shared_prefix` computes keys that neighbouring rows share once for a group of rows, before the split kernel runs.
Grids depend on shapes alone and kernels read all values on the device, so all can be captured in a CUDA graph.

An invariant plan gives a query the same bits in any batch and any chunk: both kernels use the same key tiles, end
partial sums at the same positions, merge them in the same order and round every product separately.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from kernels import kv_pages
from kernels.attention.scores import LOG2E, cap_of
from kernels.attention.shared_prefix import shared_prefix_kernel
from kernels.attention.short_prefill import ShortPrefillPlan, attend_short_prefill
from kernels.attention.split_schedule import DECODE_UNIT, RECORD, RECORDS, schedule_kernel
from kernels.attention.triton_kernels import split_kernel, tile_kernel
from kernels.dependent_launch import launch_options
from kernels.device import has_asm, is_hopper
from kernels.operands import Scores

# ---- plan and launch ----


@dataclass(frozen=True, slots=True)
class DecodePrograms:
    """Shape of the programs of `kernels.attention.decode_hopper`, measured in decode steps on one H200."""

    keys: int
    """Keys of a tile."""
    stages: int
    """Tiles that are in flight or being multiplied."""
    warps: int
    """Warps of a program."""
    programs: int
    """G: programs for all rows and heads."""

    def serve(self, row_heads: int, lines: int, dim: int, block_size: int, dtype: torch.dtype) -> bool:
        """Whether the kernel supports these shapes and each row and head can have at least two programs.

        row_heads: rows times key/value heads. lines: queries of a row and head at most. dtype: of the queries.
        """
        made = dim in (64, 128) and lines <= 64 and block_size % DECODE_UNIT.value == 0 and dtype.itemsize == 2
        return made and 2 * row_heads <= self.programs


@dataclass(frozen=True, slots=True)
class Config:
    """Tile shapes of both kernels, chosen offline by `python -m bench.kernels.tune` on one H200."""

    split_keys: int = 64
    split_warps: int = 4
    split_stages: int = 5
    split_programs: int = 264
    """G: programs that share the work of all short rows."""
    split_min_tiles: int = 1
    """The fewest key tiles of a program."""
    split_by_head: bool = False
    """Each program works on one row and head, if there are at least four programs for each row and head."""
    split_merge: int = 64
    """Query rows of partial results that are merged at a time."""
    shared_rows: int = 0
    """Search for shared prefixes in steps of at least this many rows; 0: never."""
    tile_rows: int = 128
    tile_keys: int = 128
    tile_warps: int = 8
    tile_stages: int = 3
    hopper: bool = True
    """Use `kernels.attention.prefill_hopper` where it supports the shapes."""
    decode: DecodePrograms | None = None
    """The programs of `kernels.attention.decode_hopper`; None: not used."""
    pieces: DecodePrograms | None = None
    """Those for pieces of longer rows; None: rows are not cut."""
    span: int = 0
    """Invariant plans end partial sums at multiples of this many keys; 0: at the ends of the programs' shares."""


# By head dimension, and whether the step has at most SMALL_BATCH rows: few rows give few programs, smaller tiles more.
SMALL_BATCH = 4
CONFIGS = {
    (64, True): Config(split_keys=32, split_warps=1, split_programs=264, tile_keys=64, tile_warps=4),
    (64, False): Config(split_keys=32, split_warps=1, split_programs=528, tile_keys=64, tile_warps=4),
    (128, True): Config(split_keys=32, split_warps=2, split_programs=264),
    (128, False): Config(split_by_head=True, shared_rows=17),
}
# For pools of 8 bits. The number of programs must be a multiple of what the multiprocessors' registers hold at a time:
# otherwise some multiprocessors run one program more than others, and the step waits for them.
CONFIGS_8_BIT = {
    (64, True): Config(split_keys=64, split_warps=2, split_stages=5, split_programs=264, tile_keys=64, tile_warps=4),
    (64, False): Config(
        split_keys=64, split_warps=2, split_stages=6, split_programs=792, split_merge=16, tile_keys=64, tile_warps=4
    ),
    (128, True): Config(split_keys=64, split_warps=2, split_stages=4),
    (128, False): Config(split_keys=128, split_stages=6, split_by_head=True, split_merge=32, shared_rows=17),
}
# Heads of more than 128 numbers: what fits the shared memory of every capability, not measured on a device.
WIDE = Config(
    split_keys=32, split_stages=2, tile_rows=64, tile_keys=32, tile_warps=4, tile_stages=2, hopper=False
)  # fmt: skip
# Most rows of one token -> programs on a Hopper, over pools of 16 bits and of fp8.
HOPPER_DECODE = {1: DecodePrograms(64, 3, 4, 132), 3: DecodePrograms(64, 2, 4, 264), 16: DecodePrograms(64, 2, 4, 396)}
# Beside rows of prompts.
HOPPER_BESIDE_PROMPTS = HOPPER_DECODE | {24: HOPPER_DECODE[16]}
HOPPER_DECODE_FP8 = {4: DecodePrograms(128, 2, 8, 132)}
# Of rows of a token and its guesses, over pools of 16 bits.
HOPPER_GUESSES = {1: DecodePrograms(64, 3, 4, 132), 16: DecodePrograms(64, 2, 4, 264)}
# Of pieces of longer rows.
HOPPER_PIECES = DecodePrograms(128, 2, 8, 132)
# Queries of a piece for each key/value head, and most tokens of longer rows that are cut into pieces.
PIECE_LINES, PIECES_TOKENS = 64, 128
EXACT = Config(split_keys=32, split_stages=2, tile_rows=32, tile_keys=32, tile_warps=4, tile_stages=2)
TINY = replace(EXACT, split_programs=3, split_min_tiles=1, split_keys=16, tile_keys=16, shared_rows=4)
SPAN = 512
# Query rows of a group of the shared-prefix kernel, and its programs.
GROUP_LINES, SHARED_PROGRAMS = 64, 256


def config_for(
    dim: int, dtype: torch.dtype, rows: int, invariant: bool = False, stored: torch.dtype | None = None,
    short_tokens: int = 1, long_tokens: int = 0,
) -> Config:  # fmt: skip
    """The tile shapes for a head dimension, dtype, number of rows, dtype of the pool (None: `dtype`), the most tokens
    of a short row and those of all longer ones.

    Invariant tile shapes do not depend on the number of rows.
    """
    if dtype == torch.float32:
        return replace(EXACT, span=SPAN) if invariant else EXACT
    if dim > 128:
        return replace(WIDE, span=SPAN) if invariant else WIDE
    if invariant:
        return Config(
            split_stages=3, tile_rows=64, tile_keys=64, tile_warps=4, tile_stages=3, hopper=False, span=SPAN
        )  # fmt: skip
    configs = CONFIGS if stored is None or stored.itemsize > 1 else CONFIGS_8_BIT
    if stored in (None, dtype):
        decode = HOPPER_BESIDE_PROMPTS if long_tokens else HOPPER_DECODE
        decode = HOPPER_GUESSES if short_tokens > 1 else decode
    else:
        decode = HOPPER_DECODE_FP8 if stored == kv_pages.FP8 and dim > 64 else {}
    shape = next((shape for most, shape in decode.items() if rows <= most), None)
    pieces = HOPPER_PIECES if decode else None
    return replace(configs[64 if dim <= 64 else 128, rows <= SMALL_BATCH], decode=shape, pieces=pieces)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The keys that groups of rows share, and the partial results computed from them."""

    groups: Tensor
    """int32 [groups, 2 + rows of a group]: number of shared keys, row whose block table is read, shared keys per
    row."""
    parts: Tensor
    """float32 [groups, K, splits, rows of a group, lines, D + 2]: partial results."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows that are cut into pieces of few tokens, so that their keys are shared out among many programs."""

    shape: DecodePrograms
    """The programs of `decode_hopper`."""
    records: Tensor
    """int32 [G, RECORD]: filled by `schedule_kernel`."""
    parts: Tensor
    """float32 [G, PIECE_LINES, D + 2]: partial results of programs that share a piece and head."""
    arrived: Tensor
    """int32 [pieces * K]: how many of these programs have finished; zero between launches."""
    tokens: int
    """Of a piece."""
    beyond: int
    """Rows of up to so many tokens are not cut; 0: all rows are."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which keys the rows of one step attend to; made once, used by all layers with the same window.

    The tensors may be changed in place between replays of a graph, followed by `schedule`.
    """

    starts: Tensor
    """int32 [R + 1]: the first token of each row, and T. Rows without tokens are skipped."""
    contexts: Tensor
    """int32 [R]: context length of each row, its tokens of this step included."""
    tables: Tensor
    """int32 [R, B]: block table of each row."""
    ends: Tensor
    """int32 [R + 1]: filled by `schedule_kernel`."""
    records: Tensor
    """int32 [G, RECORD]: filled by `schedule_kernel`."""
    parts: Tensor
    """float32 [parts, query rows, D + 2]: partial results of programs that share a row and head."""
    arrived: Tensor
    """int32 [R * K]: how many of these programs have finished; zero between launches."""
    shared: SharedPrefixes | None
    decode: DecodePrograms | None
    """The programs of `decode_hopper`; None: the split kernel serves short rows."""
    window: int | None
    short_tokens: int
    """Rows of more tokens than this belong to the tile kernel."""
    long_tokens: int
    """The most tokens of rows for the tile kernel; 0 launches no tile kernel."""
    pieces: Pieces | None
    """Take the place of the tile kernel, and where all rows are cut of the split kernel, too."""
    kv_heads: int
    share: int
    block_size: int
    config: Config


def plan_attention(
    starts: Tensor,
    contexts: Tensor,
    tables: Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    short_tokens: int = 1,
    long_tokens: int = 0,
    config: Config | None = None,
    plain: bool = True,
) -> AttentionPlan:
    """Allocate a plan and schedule it. starts int32 [R + 1], contexts int32 [R], tables int32 [R, B], on the device.

    short_tokens: rows of up to this many tokens share the split kernel (1 for decode, k + 1 for verification; 0: none).
    long_tokens: the tokens of longer rows, at most; 0 if there are none. plain: scores have neither cap nor sinks; the
    kernel for few rows on a Hopper takes no others.
    """
    rows, device = contexts.shape[0], starts.device
    config = config or config_for(dim, dtype, rows, short_tokens=short_tokens, long_tokens=long_tokens)
    share = heads // kv_heads
    lines = triton.next_power_of_2(max(1, short_tokens) * share)
    decode, cut = (config.decode, config.pieces) if plain and window is None and is_hopper(device) else (None, None)
    if decode and not decode.serve(rows * kv_heads, lines, dim, block_size, dtype):
        decode = None
    if cut and not cut.serve(1, PIECE_LINES, dim, block_size, dtype):
        cut = None
    alone = window or short_tokens != 1 or decode
    shared = None if alone else _shared_prefixes(config, rows, kv_heads, lines, dim, device)
    pieces = _pieces(cut, rows, short_tokens, long_tokens, kv_heads, share, dim, device) if cut else None
    programs = decode.programs if decode else config.split_programs
    partial = rows * kv_heads + programs
    if config.span:
        partial = rows * kv_heads * triton.cdiv(tables.shape[1] * block_size, config.span)
    plan = AttentionPlan(
        starts, contexts, tables,
        ends=torch.empty(rows + 1, dtype=torch.int32, device=device),
        records=torch.empty(programs, RECORD.value, dtype=torch.int32, device=device),
        parts=torch.empty(partial, lines, dim + 2, dtype=torch.float32, device=device),
        arrived=torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        shared=shared, decode=decode, window=window, short_tokens=short_tokens, long_tokens=long_tokens,
        pieces=pieces, kv_heads=kv_heads, share=share, block_size=block_size, config=config,
    )  # fmt: skip
    schedule(plan)
    return plan


def _shared_prefixes(
    config: Config, rows: int, kv_heads: int, lines: int, dim: int, device: torch.device
) -> SharedPrefixes | None:
    """Buffers for shared prefixes; None where the plan does not search for them."""
    if config.span or not 0 < config.shared_rows <= rows or 2 * lines > GROUP_LINES:
        return None
    count, most = (triton.cdiv(some, GROUP_LINES // lines) for some in (rows, triton.next_power_of_2(rows)))
    splits = max(1, min(8, SHARED_PROGRAMS // (most * kv_heads)))  # at most 8 variants, each of which is compiled
    group = GROUP_LINES // lines
    parts = torch.empty(count, kv_heads, splits, group, lines, dim + 2, device=device)
    return SharedPrefixes(torch.empty(count, 2 + group, dtype=torch.int32, device=device), parts)


def _pieces(
    shape: DecodePrograms, rows: int, short_tokens: int, long_tokens: int, kv_heads: int, share: int, dim: int,
    device: torch.device,
) -> Pieces | None:  # fmt: skip
    """Buffers for rows that are cut; None where the tile kernel serves them. All rows are cut if they are few, and then
    short ones are a piece each."""
    tokens = PIECE_LINES // triton.next_power_of_2(share)
    if not 0 < long_tokens <= PIECES_TOKENS or tokens < max(short_tokens, 1):
        return None
    most, beyond = rows + (long_tokens - 1) // tokens, 0
    if most * kv_heads > shape.programs:
        most, beyond = min(long_tokens // (short_tokens + 1), rows) + long_tokens // tokens, short_tokens
    most = triton.next_power_of_2(most)  # Few numbers, each of which is compiled.
    programs = most * kv_heads + shape.programs
    return Pieces(
        shape,
        records=torch.empty(programs, RECORD.value, dtype=torch.int32, device=device),
        parts=torch.empty(programs, PIECE_LINES, dim + 2, dtype=torch.float32, device=device),
        arrived=torch.zeros(most * kv_heads, dtype=torch.int32, device=device), tokens=tokens, beyond=beyond,
    )  # fmt: skip


def schedule(plan: AttentionPlan) -> None:
    """Distribute the work of rows again after `starts` or `contexts` changed. One small launch, or two; no host
    sync."""
    if plan.pieces:
        _schedule_pieces(plan, plan.pieces)
        if not plan.pieces.beyond:
            return
    rows, config, shared = plan.contexts.shape[0], plan.config, plan.shared
    group, programs = shared.parts.shape[3] if shared else 1, len(plan.records)
    if plan.decode:
        unit, least, apart = DECODE_UNIT.value, plan.decode.keys // DECODE_UNIT.value, True
    else:
        unit, least = config.span or config.split_keys, config.split_min_tiles
        apart = config.split_by_head and not config.span and 4 * rows * plan.kv_heads <= programs
    schedule_kernel[(triton.cdiv(programs, RECORDS.value),)](
        plan.starts, plan.contexts, plan.tables, shared.groups if shared else None, plan.ends, plan.records, rows,
        plan.kv_heads, plan.tables.shape[1], plan.window or 0, 0, plan.short_tokens, G=programs,
        TILE=unit, MIN_TILES=least, P=plan.block_size, GROUP=group, BY_HEAD=apart, WINDOW=plan.window is not None,
        BLOCK_R=max(16, group, triton.next_power_of_2(rows)), CUT=0, BLOCK_V=1, AT_ONCE=programs,
        num_warps=4, **launch_options(plan.starts.device),
    )  # fmt: skip


def _schedule_pieces(plan: AttentionPlan, pieces: Pieces) -> None:
    rows, programs = plan.contexts.shape[0], len(pieces.records)
    schedule_kernel[(triton.cdiv(programs, RECORDS.value),)](
        plan.starts, plan.contexts, plan.tables, None, None, pieces.records, rows, plan.kv_heads,
        plan.tables.shape[1], 0, pieces.beyond, 1 << 30, G=programs, TILE=DECODE_UNIT.value,
        MIN_TILES=pieces.shape.keys // DECODE_UNIT.value, P=plan.block_size, GROUP=1, BY_HEAD=True, WINDOW=False,
        BLOCK_R=max(16, triton.next_power_of_2(rows)), CUT=pieces.tokens,
        BLOCK_V=len(pieces.arrived) // plan.kv_heads, AT_ONCE=pieces.shape.programs,
        num_warps=4, **launch_options(plan.starts.device),
    )  # fmt: skip


def attention(
    q_THD: Tensor,
    kv_NP2KD: Tensor,
    plan: AttentionPlan | ShortPrefillPlan,
    scores: Scores,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(scores) v for each row over its own blocks, causal, grouped heads. -> [T, H * D].

    q_THD may have any token stride; its heads must be contiguous. A row with no context gives zeros. The pool may have
    any format of `kernels.kv_pages`; kv_scales float32 [2, K] are those of an fp8 pool, None: all 1.
    """
    tokens, heads, dim = q_THD.shape
    kv_heads = kv_NP2KD.shape[3]
    assert q_THD.stride()[1:] == (dim, 1)
    if out is None:
        out = torch.empty(tokens, heads * dim, dtype=q_THD.dtype, device=q_THD.device)
    if isinstance(plan, ShortPrefillPlan):
        attend_short_prefill(q_THD, kv_NP2KD, plan, out, scores)
        return out
    assert kv_pages.block_size_of(kv_NP2KD) == plan.block_size
    assert (kv_heads, heads) == (plan.kv_heads, plan.kv_heads * plan.share)
    if pieces := plan.pieces:
        assert scores.is_plain, "the plan is for plain scores"
        _attend_decode(q_THD, kv_NP2KD, kv_scales, out, plan.tables, pieces, pieces.shape, scores)
        if not pieces.beyond:
            return out
    elif plan.long_tokens:
        _attend_long(q_THD, kv_NP2KD, kv_scales, out, plan, scores)
    if plan.long_tokens < tokens:
        _attend_short(q_THD, kv_NP2KD, kv_scales, out, plan, scores)
    return out


def _attend_decode(
    q_THD: Tensor, kv_NP2KD: Tensor, kv_scales: Tensor | None, out: Tensor, tables: Tensor,
    work: AttentionPlan | Pieces, programs: DecodePrograms, scores: Scores,
) -> None:  # fmt: skip
    from kernels.attention import decode_hopper  # imported here: other devices cannot compile it

    decode_hopper.attend_decode(
        q_THD, kv_NP2KD, kv_scales, out, tables, work.records, work.parts, work.arrived, scores.scale * LOG2E,
        programs.keys, programs.stages, programs.warps,
    )  # fmt: skip


def _attend_long(
    q_THD: Tensor, kv_NP2KD: Tensor, kv_scales: Tensor | None, out: Tensor, plan: AttentionPlan, scores: Scores
) -> None:
    config, rows, scale = plan.config, plan.contexts.shape[0], scores.scale * LOG2E
    tiles_kernel = _hopper(q_THD, kv_NP2KD.dtype, plan) if scores.is_plain else None
    tile_rows = tiles_kernel.ROWS if tiles_kernel else config.tile_rows
    tiles = min(plan.long_tokens // (plan.short_tokens + 1), rows)
    tiles += triton.cdiv(plan.long_tokens, tile_rows // plan.share)
    if tiles_kernel:
        tiles_kernel.attend_tiles(
            q_THD, kv_NP2KD, kv_scales, out, plan.starts, plan.contexts, plan.tables, tiles, scale, plan.window,
            plan.short_tokens,
        )  # fmt: skip
        return
    tile_kernel[(tiles * plan.kv_heads,)](
        q_THD, kv_NP2KD, kv_scales, out, plan.starts, plan.contexts, plan.tables, scores.sinks, rows,
        plan.kv_heads, plan.tables.shape[1], q_THD.stride(0), scale, plan.window or 0, plan.short_tokens,
        TILE=config.tile_keys, M=config.tile_rows, BLOCK_R=max(16, triton.next_power_of_2(rows)),
        WINDOW=plan.window is not None, SPAN=config.span, STAGES=config.tile_stages, num_warps=config.tile_warps,
        **_constants(q_THD, kv_NP2KD, plan, scores),
    )  # fmt: skip


def _attend_short(
    q_THD: Tensor, kv_NP2KD: Tensor, kv_scales: Tensor | None, out: Tensor, plan: AttentionPlan, scores: Scores
) -> None:
    if plan.decode:
        assert scores.is_plain, "the plan is for plain scores"
        _attend_decode(q_THD, kv_NP2KD, kv_scales, out, plan.tables, plan, plan.decode, scores)
        return
    scale = scores.scale * LOG2E
    config, shared, rows, lines = plan.config, plan.shared, plan.contexts.shape[0], plan.parts.shape[1]
    numbers = (rows, plan.kv_heads, plan.tables.shape[1], q_THD.stride(0), scale)
    count, _, splits, group, _, _ = shared.parts.shape if shared else (0, 0, 1, 1, 0, 0)
    constants: dict[str, Any] = _constants(q_THD, kv_NP2KD, plan, scores) | {
        "TILE": config.split_keys, "LINES": lines, "GROUP": group, "SPLITS": splits,
    }  # fmt: skip
    if shared:
        shared_prefix_kernel[(count * plan.kv_heads * splits,)](
            q_THD, kv_NP2KD, kv_scales, plan.starts, plan.tables, shared.groups, shared.parts, *numbers, STAGES=3,
            num_warps=4, **constants,
        )  # fmt: skip
    columns = kv_NP2KD.dtype.itemsize == 1 and not config.span
    split_kernel[(config.split_programs,)](
        q_THD, kv_NP2KD, kv_scales, out, plan.starts, plan.contexts, plan.tables, plan.ends, plan.records,
        shared.groups if shared else None, shared.parts if shared else None, plan.parts, plan.arrived,
        scores.sinks, *numbers, plan.window or 0,
        M=config.tile_rows if config.span else max(8 if columns else 16, lines),
        MERGE=max(1, config.split_merge // lines), WINDOW=plan.window is not None, SPAN=config.span, TRANSPOSED=columns,
        ASM=has_asm(q_THD.device), STAGES=config.split_stages, num_warps=config.split_warps, **constants,
    )  # fmt: skip


def _constants(q_THD: Tensor, kv_NP2KD: Tensor, plan: AttentionPlan, scores: Scores) -> dict[str, Any]:
    """Compile-time constants that these kernels share."""
    dim = q_THD.shape[2]
    return {
        "SHARE": plan.share, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)), "P": plan.block_size,
        "ROWS": kv_NP2KD.shape[1], "CAP": cap_of(scores),
        "IEEE": q_THD.dtype == torch.float32, "enable_fp_fusion": not plan.config.span,
        **launch_options(q_THD.device),
    }  # fmt: skip


def _hopper(q_THD: Tensor, stored: torch.dtype, plan: AttentionPlan) -> ModuleType | None:
    """The module of the Hopper tile kernel if it supports these shapes; imported here: other devices cannot compile
    it."""
    if not launch_options(q_THD.device)["PDL"] or not plan.config.hopper:
        return None
    from kernels.attention import prefill_hopper

    served = prefill_hopper.serves(q_THD.shape[2], q_THD.dtype, stored, plan.block_size, plan.share)
    return prefill_hopper if served and torch.cuda.get_device_capability(q_THD.device)[0] == 9 else None
