"""A product of few rows with a plain 16-bit weight and what adapters add to it, in one kernel.

To the weight's rows the A of the step's adapters are appended, and their B to its columns: the first programs multiply
x with rows of A and set to zero what belongs to rows of other adapters; all others multiply x with rows of W, wait for
the first ones, and go on with the columns of B. So the adapters cost what it takes to read them, and no launch.

    M rows of x    N outputs    K inputs    R rank, padded    P parts: modules whose outputs follow one another
    A adapters of the step, PER of them in a group: GROUP = PER * R lines of A, or columns of B, at a time
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options
from kernels.linear import dense
from kernels.linear.dense import MAX_ROWS, multiply
from kernels.linear.split_k import Tile, finish, join, workspace
from kernels.lora import AdapterStack

GROUP = 64
_SPLIT_INPUTS, _MOST_SPLITS = 512, 16
_BESIDE_CUBLAS = Tile(64, 128, 2, stages=3)
"""Where products without adapters are cuBLAS's."""


@triton.jit
def _shrink(
    x, a, chosen, owners, hidden, parts, arrived, ready, count, program, M, K, x_stride, groups,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A SPLIT-th of the columns of a group's A of one part; the last to arrive stores the sum in `hidden`."""
    block, split = program // SPLIT, program % SPLIT
    part, lanes, rows = block // groups, tl.arange(0, GROUP), tl.arange(0, BLOCK_M)
    place = (block % groups) * (GROUP // R) + lanes // R
    here = place < count
    slot = tl.load(chosen + 1 + place, mask=here, other=0)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    low, high = split * span, tl.minimum(split * span + span, K)
    product, up = multiply(
        x, a, (slot * P + part) * R + lanes % R, 0, here, low, high, rows, M, K, x_stride, BLOCK_K, False, False,
        STAGES, AHEAD, PDL,
    )  # fmt: skip
    some = rows < M
    owner = tl.load(owners + rows, mask=some, other=-1)
    width = P * groups * GROUP
    target = rows[None, :] * width + (block * GROUP + lanes)[:, None]
    valid = some[None, :] & (lanes >= 0)[:, None]
    last, product, up = join(product, up, parts, arrived, block, split, target, valid, M * width, SPLIT, False)
    if last:
        own = tl.where(place[:, None] == owner[None, :], product, 0.0)
        tl.store(hidden + target, own.to(hidden.dtype.element_ty), mask=valid)
        tl.debug_barrier()
        tl.atomic_add(ready, 1, sem="acq_rel")


@triton.jit
def _columns_of_b(b, chosen, count, group, columns, here, outputs, R: tl.constexpr, GROUP: tl.constexpr):
    """Lines `columns` of a group's B: [BLOCK_N, GROUP]."""
    lanes = tl.arange(0, GROUP)
    place = group * (GROUP // R) + lanes // R
    slot = tl.load(chosen + 1 + place, mask=place < count, other=0).to(tl.int64)
    offset = (slot[None, :] * outputs + columns[:, None]) * R + (lanes % R)[None, :]
    # The compiler cannot know that R numbers follow one another: it cannot see that their slot is the same.
    offset = tl.multiple_of(tl.max_contiguous(offset, [1, R]), [1, R])
    inside = here[:, None] & (place < count)[None, :]
    return tl.load(b + offset, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _expand(
    product, up, b, chosen, hidden, ready, count, split, columns, rows, M, N, end_0, end_1, groups, programs,
    P: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Wait for `hidden` and add what this split's groups of adapters add to both products."""
    used = tl.cdiv(count, GROUP // R)
    while tl.atomic_add(ready, 0, sem="acquire") < P * used:
        pass
    first = tl.min(columns)
    part = 0 if GATED else (first >= end_0).to(tl.int32) + (first >= end_1).to(tl.int32)
    outputs, here = (2 * N if GATED else N), columns < N
    lines = hidden + rows[:, None] * (P * groups * GROUP) + part * groups * GROUP + tl.arange(0, GROUP)[None, :]
    some = (rows < M)[:, None]
    # Twice the stages: where lines of B are follows from slots, which are loaded as many stages before.
    for group in tl.range(split, used, SPLIT, num_stages=2 * STAGES):
        adding = _columns_of_b(b, chosen, count, group, columns, here, outputs, R, GROUP)
        own = tl.load(lines + group * GROUP, mask=some, other=0.0, cache_modifier=".cg")
        product = tl.dot(adding, tl.trans(own), product)
        if GATED:
            adding = _columns_of_b(b, chosen, count, group, columns + N, here, outputs, R, GROUP)
            own = tl.load(lines + (groups + group) * GROUP, mask=some, other=0.0, cache_modifier=".cg")
            up = tl.dot(adding, tl.trans(own), up)
    # The last program to come here leaves the counters as it found them.
    if tl.atomic_add(ready + 1, 1, sem="acq_rel") == programs - 1:
        tl.store(ready, 0)
        tl.store(ready + 1, 0)
    return product, up


@triton.jit(do_not_specialize=["M", "groups"])
def adapted_kernel(
    x,  # [M, K], rows x_stride apart
    w,  # [N, K]; GATED: [2N, K], the gates and then the ups
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    a,  # [slots, P, R, K]
    b,  # [slots, N, R]; GATED: [slots, 2N, R]
    chosen,  # int32 [1 + A]: how many adapters the step has, and their slots
    owners,  # int32 [M]: which of them is a row's; -1: none
    hidden,  # [M, P, groups, GROUP]
    parts,  # float32 [2 or 1, SPLIT, M, N]
    shrunk,  # float32 [SHRINK_SPLIT, M, P, groups, GROUP]
    arrived,  # int32 [cdiv(N, BLOCK_N) + P * groups + 2], zero between launches
    M, N, K, x_stride, end_0, end_1, groups,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, SHRINK_SPLIT: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first P * groups * SHRINK_SPLIT programs multiply with A; they begin first, so the others may wait for
    them. The step's adapters are known since it began, so programs of groups that it has not end at once."""
    count = tl.load(chosen)
    tiles, first = tl.cdiv(N, BLOCK_N), P * groups * SHRINK_SPLIT
    ready = arrived + tiles + P * groups
    program = tl.program_id(0)
    if program < first:
        if (program // SHRINK_SPLIT % groups) * (GROUP // R) < count:
            _shrink(
                x, a, chosen, owners, hidden, shrunk, arrived + tiles, ready, count, program, M, K, x_stride, groups,
                P, R, BLOCK_M, BLOCK_K, SHRINK_SPLIT, GROUP, STAGES, AHEAD, PDL,
            )  # fmt: skip
    else:
        tile, split = (program - first) % tiles, (program - first) // tiles
        columns, rows = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
        span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
        low, high = split * span, tl.minimum(split * span + span, K)
        product, up = multiply(
            x, w, columns, N, columns < N, low, high, rows, M, K, x_stride, BLOCK_K, GATED, False, STAGES, AHEAD, PDL
        )
        if count > 0:
            product, up = _expand(
                product, up, b, chosen, hidden, ready, count, split, columns, rows, M, N, end_0, end_1, groups,
                tiles * SPLIT, P, R, SPLIT, GATED, GROUP, STAGES,
            )  # fmt: skip
        finish(product, up, bias, residual, out, parts, arrived, tile, split, columns, rows, M, N, SPLIT, GATED)


def tile_for(x: Tensor, stack: AdapterStack, gated: bool) -> Tile | None:
    """The tile for x [M, K], or None where other kernels serve."""
    rows, k = x.shape
    _, parts, rank, _ = stack.a.shape
    n = stack.ends[-1] // 2 if gated else stack.ends[-1]
    if not 0 < rows <= MAX_ROWS or x.dtype.itemsize != 2 or rank > GROUP or k % 8:
        return None
    tile = dense.tile_for(rows, n, k, gated, x.dtype) or _BESIDE_CUBLAS
    if gated:
        return tile if parts == 2 and stack.ends[0] == n else None
    return None if any(end % tile.n for end in stack.ends[:-1]) else tile


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, stack: AdapterStack, chosen: Tensor, owners: Tensor, *,
    tile: Tile, residual: Tensor | None = None, gated: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `dense.linear`, with what each row's adapter adds to the product before it is gated. The numbers of A and B
    must be finite.

    chosen int32 [1 + A] and owners int32 [M] as `kernels.lora.tiles` lays them out; tile as `tile_for` chooses it.
    """
    (rows, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    _, p, rank, _ = stack.a.shape
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    groups = triton.cdiv(len(chosen) - 1, GROUP // rank)
    splits = min(_MOST_SPLITS, triton.cdiv(k, _SPLIT_INPUTS))
    hidden = torch.empty(rows, p * groups * GROUP, dtype=x.dtype, device=x.device)
    words = (1 + gated) * tile.split * rows * n
    space = workspace(x.device, words + splits * hidden.numel())
    end_0, end_1 = (*stack.ends, stack.ends[-1])[:2]
    adapted_kernel[(p * groups * splits + triton.cdiv(n, tile.n) * tile.split,)](
        x, weight, bias, residual, out, stack.a, stack.b, chosen, owners, hidden, space.parts, space.parts[words:],
        space.arrived, rows, n, k, x.stride(0), end_0, end_1, groups, P=p, R=rank,
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile.n, BLOCK_K=tile.k, SPLIT=tile.split,
        SHRINK_SPLIT=splits, GATED=gated, GROUP=GROUP, STAGES=tile.stages_on(x.device), AHEAD=tile.ahead,
        num_warps=tile.warps, **launch_options(x.device),
    )  # fmt: skip
    return out
