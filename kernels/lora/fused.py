"""A product of few rows with a plain 16-bit weight and what adapters add to it, in one kernel.

To the weight's rows the A of the step's adapters are appended, and their B to its columns. Programs that multiply with
rows of A store what each row of x gives with its own adapter. All programs with a tile of W wait for them, and go on
with the columns of B. So the adapters cost what it takes to read them, and no launch.

    M rows of x    N outputs    K inputs    R rank, padded    P parts: modules whose outputs follow one another
    A adapters of the step that change a part, PER of them in a group: GROUP = PER * R lines of A, or columns of B
    a block: a group of one part    a share: some columns of a block's A
    SUMMED: the last share of a block adds all of them; else each tile that needs them does, which takes less where
    SPLIT programs share a tile, so that their products are short.

Programs wait for others that may begin after them: a launch must have the GPU's processors for itself, but for kernels
that end. So it serves no process under MPS.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, prefetch
from kernels.device import processors, under_mps
from kernels.linear import dense
from kernels.linear.dense import multiply
from kernels.linear.split_k import Tile, finish, workspace
from kernels.lora import AdapterStack
from kernels.lora.tiles import FEW

_BESIDE_CUBLAS = Tile(64, 128, stages=4)
"""Where products without adapters are cuBLAS's."""
_AT_ONCE = Tile(128, 64, stages=4, warps=8)
"""Gated products whose programs run all at once with it: each waits for A once, and processors without a tile multiply
with A."""
_MOST_RANK = 64
_LEAST_APART = 12
"""Programs that only multiply with A run on processors that have no tile, if there are so many."""


@triton.jit
def _blocks(chosen, width, P: tl.constexpr, PER: tl.constexpr):
    """Blocks of the first part, of the first two, and of all."""
    first = tl.cdiv(tl.load(chosen), PER)
    two, all = first, first
    if P > 1:
        two += tl.cdiv(tl.load(chosen + width), PER)
        all = two
    if P > 2:
        all += tl.cdiv(tl.load(chosen + 2 * width), PER)
    return first, two, all


@triton.jit
def _shrink(
    x, a, chosen, owners, hidden, shrunk, ready, arrived, part, group, share, shares, M, K, x_stride,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    MOST_SHARES: tl.constexpr, SUMMED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One share of a block: stores the sums of each row with its own adapter. chosen, owners: of this part."""
    lanes, rows = tl.arange(0, GROUP), tl.arange(0, BLOCK_M)
    place = group * (GROUP // R) + lanes // R
    here = place < tl.load(chosen)
    slot = tl.load(chosen + 1 + place, mask=here, other=0)
    owner = tl.load(owners + rows, mask=rows < M, other=-1)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), shares) * BLOCK_K
    low, high = share * span, tl.minimum(share * span + span, K)
    product, _ = multiply(
        x, a, (slot * P + part) * R + lanes % R, 0, here, low, high, rows, M, K, x_stride, BLOCK_K, False, False,
        STAGES, AHEAD, PDL,
    )  # fmt: skip
    target = ((share * M + rows)[None, :] * P + part) * R + (lanes % R)[:, None]
    tl.store(hidden + target, product, mask=place[:, None] == owner[None, :])
    tl.debug_barrier()
    if not SUMMED:
        tl.atomic_add(ready, 1, sem="release")
    elif tl.atomic_add(arrived, 1, sem="acq_rel") == shares - 1:
        tl.store(arrived, 0)
        first = group * (GROUP // R)
        its = (owner >= first) & (owner < first + GROUP // R)
        sums = _sums(hidden, its, rows, part, shares, M, P, R, MOST_SHARES)
        one = (rows[:, None] * P + part) * R + tl.arange(0, R)[None, :]
        tl.store(shrunk + one, sums.to(shrunk.dtype.element_ty), mask=its[:, None])
        tl.debug_barrier()
        tl.atomic_add(ready, 1, sem="release")


@triton.jit
def _sums(hidden, some, rows, part, shares, M, P: tl.constexpr, R: tl.constexpr, MOST_SHARES: tl.constexpr):
    """The sums of all shares, of some rows: [BLOCK_M, R]."""
    sums = tl.zeros([rows.shape[0], R], tl.float32)
    for share in tl.static_range(MOST_SHARES):
        place = ((share * M + rows)[:, None] * P + part) * R + tl.arange(0, R)[None, :]
        sums += tl.load(hidden + place, mask=some[:, None] & (share < shares), other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _prefetch_w(w, columns, here, low, high, N, K, GATED: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch the first columns of a tile's lines of W into the L2 cache."""
    lines = low + tl.arange(0, AHEAD)[None, :] * 64  # 128 bytes
    inside = here[:, None] & (lines < high)
    prefetch(tl.where(inside, w + columns.to(tl.int64)[:, None] * K + lines, w))
    if GATED:
        prefetch(tl.where(inside, w + (columns + N).to(tl.int64)[:, None] * K + lines, w))


@triton.jit
def _await(ready, complete, programs):
    """Wait for `complete` shares or blocks. Each of the `programs` that wait counts itself once, and the last one
    leaves the counter as it found it; so zero means ready, too."""
    found = tl.atomic_add(ready, 65536, sem="acquire") + 65536
    last = found // 65536 == programs
    while (found % 65536 < complete) & (found >= 65536):
        found = tl.atomic_add(ready, 0, sem="acquire")
    if last:
        tl.store(ready, 0)


@triton.jit
def _repeated(
    hidden, shrunk, owner, rows, part, shares, M, P: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    MOST_SHARES: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """What each row's own A made of it, repeated for each adapter of a group: [GROUP, BLOCK_M]. Of a row without an
    adapter these are any numbers."""
    if SUMMED:
        place = (rows[:, None] * P + part) * R + tl.arange(0, R)[None, :]
        one = tl.load(shrunk + place, mask=(rows < M)[:, None], other=0.0, cache_modifier=".cg")
    else:
        sums = _sums(hidden, owner >= 0, rows, part, shares, M, P, R, MOST_SHARES)
        one = sums.to(shrunk.dtype.element_ty)
    one = tl.trans(one)[None, :, :]
    return tl.reshape(tl.broadcast_to(one, [GROUP // R, R, rows.shape[0]]), [GROUP, rows.shape[0]])


@triton.jit
def _columns_of_b(b, chosen, count, first, columns, here, outputs, R: tl.constexpr, GROUP: tl.constexpr):
    """Lines `columns` of the B of a group, whose first adapter is the part's `first`: [BLOCK_N, GROUP]."""
    lanes = tl.arange(0, GROUP)
    place = first + lanes // R
    slot = tl.load(chosen + 1 + place, mask=place < count, other=0).to(tl.int64)
    offset = (slot[None, :] * outputs + columns[:, None]) * R + (lanes % R)[None, :]
    # The compiler cannot know that R numbers follow one another: it cannot see that their slot is the same.
    offset = tl.multiple_of(tl.max_contiguous(offset, [1, R]), [1, R])
    inside = here[:, None] & (place < count)[None, :]
    return tl.load(b + offset, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _own(repeated, owner, first, R: tl.constexpr):
    """Lines of `repeated` [GROUP, BLOCK_M] of each row's own adapter, zero elsewhere."""
    place = first + tl.arange(0, repeated.shape[0]) // R
    return tl.where(place[:, None] == owner[None, :], repeated, 0.0)


@triton.jit
def _expand(
    product, up, b, lists, count, up_count, owner, up_owner, own, up_own, split, columns, M, N, width,
    R: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what this split's groups of adapters add to both products. own, up_own: as `_repeated` gives them."""
    outputs, here = (2 * N if GATED else N), columns < N
    most = tl.maximum(count, up_count)
    for first in tl.range(split * (GROUP // R), most, SPLIT * (GROUP // R), num_stages=STAGES):
        adding = _columns_of_b(b, lists, count, first, columns, here, outputs, R, GROUP)
        product = tl.dot(adding, _own(own, owner, first, R), product)
        if GATED:
            adding = _columns_of_b(b, lists + width, up_count, first, columns + N, here, outputs, R, GROUP)
            up = tl.dot(adding, _own(up_own, up_owner, first, R), up)
    return product, up


@triton.jit(do_not_specialize=["M", "width", "height", "workers", "most"])
def adapted_kernel(
    x,  # [M, K], rows x_stride apart
    w,  # [N, K]; GATED: [2N, K], the gates and then the ups
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    a,  # [slots, P, R, K]
    b,  # [slots, N, R]; GATED: [slots, 2N, R]
    chosen,  # int32 [P, 1 + A], rows width apart: how many adapters change a part, and their slots
    owners,  # int32 [P, M], rows height apart: which of them is a row's; -1: none
    hidden,  # float32 [MOST_SHARES, M, P, R]: of rows with an adapter
    shrunk,  # [M, P, R], SUMMED: the sum over shares
    parts,  # float32 [2 or 1, SPLIT, M, N]
    arrived,  # int32 [cdiv(N, BLOCK_N) + 1 + blocks], zero between launches
    M, N, K, x_stride, end_0, end_1, width, height,
    workers,  # programs that multiply with A
    most,  # shares of all blocks
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, MOST_SHARES: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    SHRINK_STAGES: tl.constexpr, EXPAND_STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    APART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Programs with a tile multiply with A before it; APART: those behind them do. The step's adapters are known since
    it began."""
    tiles = tl.cdiv(N, BLOCK_N)
    ready, program = arrived + tiles, tl.program_id(0)
    tile, split = program % tiles, program // tiles
    columns, rows = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    low, high = split * span, tl.minimum(split * span + span, K)
    has_tile = program < tiles * SPLIT
    if PDL and AHEAD > 0 and has_tile:
        _prefetch_w(w, columns, columns < N, low, high, N, K, GATED, AHEAD)
    end_of_first, end_of_second, blocks = _blocks(chosen, width, P, GROUP // R)
    shares = tl.maximum(tl.minimum(most // tl.maximum(blocks, 1), MOST_SHARES), 1)
    worker = program
    if APART:
        worker = tl.where(has_tile, workers, program - tiles * SPLIT)
    worker = tl.where(worker < workers, worker, blocks * shares)
    for unit in tl.range(worker, blocks * shares, workers, num_stages=1):
        block = unit // shares
        second, third = block >= end_of_first, block >= end_of_second
        part = second.to(tl.int32) + third.to(tl.int32)
        group = block - tl.where(third, end_of_second, tl.where(second, end_of_first, 0))
        _shrink(
            x, a, chosen + part * width, owners + part * height, hidden, shrunk, ready, ready + 1 + block, part, group,
            unit % shares, shares, M, K, x_stride, P, R, BLOCK_M, BLOCK_K, GROUP, MOST_SHARES, SUMMED, SHRINK_STAGES,
            AHEAD, PDL,
        )  # fmt: skip
    if has_tile:
        # What is known is loaded before the product, so that nothing but A is waited for after it.
        begin = tile * BLOCK_N
        part = 0 if GATED else (begin >= end_0).to(tl.int32) + (begin >= end_1).to(tl.int32)
        lists, some = chosen + part * width, rows < M
        count, owner = tl.load(lists), tl.load(owners + part * height + rows, mask=some, other=-1)
        up_count, up_owner = 0, owner
        if GATED:
            up_count, up_owner = tl.load(lists + width), tl.load(owners + height + rows, mask=some, other=-1)
        product, up = multiply(
            x, w, columns, N, columns < N, low, high, rows, M, K, x_stride, BLOCK_K, GATED, False, STAGES, 0, PDL
        )
        if blocks > 0:
            _await(ready, blocks if SUMMED else blocks * shares, tiles * SPLIT)
            own = _repeated(hidden, shrunk, owner, rows, part, shares, M, P, R, GROUP, MOST_SHARES, SUMMED)
            up_own = own
            if GATED:
                up_own = _repeated(hidden, shrunk, up_owner, rows, 1, shares, M, P, R, GROUP, MOST_SHARES, SUMMED)
            product, up = _expand(
                product, up, b, lists, count, up_count, owner, up_owner, own, up_own, split, columns, M, N, width,
                R, SPLIT, GATED, GROUP, EXPAND_STAGES,
            )  # fmt: skip
        finish(product, up, bias, residual, out, parts, arrived, tile, split, columns, rows, M, N, SPLIT, GATED)


def tile_for(x: Tensor, stack: AdapterStack, gated: bool) -> Tile | None:
    """The tile for x [M, K], or None where other kernels serve."""
    rows, k = x.shape
    _, parts, rank, _ = stack.a.shape
    n = stack.ends[-1] // 2 if gated else stack.ends[-1]
    if not 0 < rows <= FEW or x.dtype.itemsize != 2 or rank > _MOST_RANK or k % 8 or under_mps():
        return None
    tile = dense.tile_for(rows, n, k, gated, x.dtype) or _BESIDE_CUBLAS
    if gated:
        if triton.cdiv(n, _AT_ONCE.n) <= _processors(x.device) < triton.cdiv(n, tile.n):
            tile = _AT_ONCE
        return tile if parts == 2 and stack.ends[0] == n else None
    return None if any(end % tile.n for end in stack.ends[:-1]) else tile


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, stack: AdapterStack, chosen: Tensor, owners: Tensor, *,
    tile: Tile, residual: Tensor | None = None, gated: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `dense.linear`, with what each row's adapter adds to the product before it is gated. The numbers of A and B
    must be finite.

    chosen int32 [P, 1 + A] and owners int32 [P, M] as `kernels.lora.tiles` lays them out; tile as `tile_for` chooses
    it.
    """
    (rows, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    _, p, rank, _ = stack.a.shape
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    end_0, end_1 = (*stack.ends, stack.ends[-1])[:2]
    programs = triton.cdiv(n, tile.n) * tile.split
    workers, apart = _workers(_processors(x.device), programs)
    # Measured on one H100 and one H200. A processor with two tiles adds the shares of two.
    most_shares = 4 if programs > workers and not apart else 16
    stages = tile.stages_on(x.device)
    space = workspace(x.device, (1 + gated) * tile.split * rows * n)
    hidden = torch.empty(most_shares, rows, p, rank, dtype=torch.float32, device=x.device)
    shrunk = torch.empty(rows, p, rank, dtype=x.dtype, device=x.device)
    adapted_kernel[(programs + workers * apart,)](
        x, weight, bias, residual, out, stack.a, stack.b, chosen, owners, hidden, shrunk, space.parts, space.arrived,
        rows, n, k, x.stride(0), end_0, end_1, chosen.stride(0), owners.stride(0), workers, max(workers, 8),
        P=p, R=rank, BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile.n, BLOCK_K=tile.k, SPLIT=tile.split,
        MOST_SHARES=most_shares, GATED=gated, GROUP=_group(tile), STAGES=stages, SHRINK_STAGES=min(stages, 4),
        EXPAND_STAGES=min(2 * stages, 8 if tile.n <= 64 else 4), AHEAD=tile.ahead, APART=apart, SUMMED=tile.split == 1,
        num_warps=tile.warps, **launch_options(x.device),
    )  # fmt: skip
    return out


def _processors(device: torch.device) -> int:
    """Programs that run at once: in Triton's interpreter one."""
    return processors(device) if device.type == "cuda" else 1


def _workers(at_once: int, programs: int) -> tuple[int, bool]:
    """How many programs multiply with A, and whether they have no tile. programs: those with one."""
    idle = at_once - programs
    return (idle, True) if idle >= _LEAST_APART else (min(at_once, programs), False)


def _group(tile: Tile) -> int:
    """Lines of A, or columns of B, at a time."""
    return 128 if tile.split == 1 else 64
