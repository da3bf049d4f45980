"""Products of many rows with weights of four bits on a Hopper: y = x W^T, in Gluon.

As `kernels.products.words_hopper`, in tiles of 128 rows of W and 128 or 256 of x: a warp fetches words and another rows
of x, two warpgroups turn 64 rows of words each into 16-bit floats in registers, scaled, and multiply. Tiles that make
whole rounds of all multiprocessors have one program each; those that are left may be shared in equal parts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.products.gluon_parts import flattened, scaled, store_lines, unflattened
from kernels.products.words import numbers
from kernels.products.words_hopper import word_layout


@gluon.jit
def _pieces(plan):
    """How many tiles, or pieces of them, a program computes."""
    alone, span, units, C = plan
    whole = (alone - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    start = gl.program_id(0) * span
    end = gl.minimum(start + span, units)
    return whole + gl.maximum((end + C - 1) // C - start // C, 0)


@gluon.jit
def _piece(index, plan):
    """-> a tile, which of the shared ones it is (below 0: it is not), and its chunks: from `low` to `high`.

    First come whole tiles, which all programs take in turn; then the program's share of the others, its end first.
    """
    alone, span, units, C = plan
    tile, low, high = index * gl.num_programs(0) + gl.program_id(0), 0, C
    if tile >= alone:
        whole = (alone - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
        start = gl.program_id(0) * span
        end = gl.minimum(start + span, units)
        shared = (end - 1) // C - (index - whole)
        tile = alone + shared
        low, high = gl.maximum(start - shared * C, 0), gl.minimum(end - shared * C, C)
    return tile, tile - alone, low, high


@gluon.jit
def _place(tile, sides):
    """-> which rows of W and of x a tile has. Tiles come in bands of `band` tiles of x, each with all rows of W."""
    down, band, across = sides
    above = tile // (band * across) * band
    height = gl.minimum(band, down - above)
    within = tile - above * across
    return within // height, above + within % height


@gluon.jit
def _fetch_words(words, buffers, full, empty, plan, sides, N, C, GATED: gl.constexpr):
    """128 rows of words for each chunk; GATED: 64 gates and 64 ups."""
    RING: gl.constexpr = buffers.shape[0]
    halves = buffers._reinterpret(gl.int32, [2 * RING, 64, 16], words.layout)
    count = 0
    for index in range(_pieces(plan)):
        tile, _, low, high = _piece(index, plan)
        across, _ = _place(tile, sides)
        first = across if GATED else 2 * across
        second = across + N // 64 if GATED else 2 * across + 1
        for chunk in range(low, high):
            slot = count % RING
            mbarrier.wait(empty.index(slot), (count // RING + 1) & 1)
            mbarrier.expect(full.index(slot), 128 * 64)
            place = halves.index(2 * slot)
            tma.async_copy_global_to_shared(words, [(first * C + chunk) * 64, 0], full.index(slot), place)
            place = halves.index(2 * slot + 1)
            tma.async_copy_global_to_shared(words, [(second * C + chunk) * 64, 0], full.index(slot), place)
            count += 1


@gluon.jit
def _fetch_rows(x, buffers, full, empty, plan, sides):
    """The rows of x for each chunk, in two panels of 64 columns."""
    STAGES: gl.constexpr = buffers.shape[0]
    BLOCK_M: gl.constexpr = buffers.shape[1]
    gdc_wait()
    count = 0
    for index in range(_pieces(plan)):
        tile, _, low, high = _piece(index, plan)
        _, line = _place(tile, sides)
        for panel in range(2 * low, 2 * high):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), BLOCK_M * 128)
            tma.async_copy_global_to_shared(x, [line * BLOCK_M, panel * 64], full.index(stage), buffers.index(stage))
            count += 1


@gluon.jit
def _places(rows, groups, N, GATED: gl.constexpr):
    """Where the scales of rows begin. rows: as they lie in the tiles; GATED: of 16 the first 8 are gates."""
    if GATED:
        rows = rows // 16 * 8 + rows % 8 + rows % 16 // 8 * N
    rows = gl.minimum(rows, (2 * N if GATED else N) - 1)
    return rows // 64 * groups * 64 + rows % 64


@gluon.jit
def _words_of(buffer, group: gl.constexpr, GATED: gl.constexpr):
    """A warpgroup's words of one chunk, in the threads that need them: [64, 16]; GATED: of 16 rows the first 8 are
    gates, the others ups."""
    wanted: gl.constexpr = word_layout(16, False)
    if GATED:
        half: gl.constexpr = word_layout(16, True)
        both = gl.join(buffer.slice(32 * group, 32).load(half), buffer.slice(64 + 32 * group, 32).load(half))
        both = both.reshape([4, 8, 16, 2]).permute([0, 3, 1, 2]).reshape([64, 16])
        found = gl.convert_layout(both, wanted, assert_trivial=True)
    else:
        found = buffer.slice(64 * group, 64).load(wanted)
    return found


@gluon.jit
def _sum(x_buffers, word_buffers, barriers, scales, zeros, word_place, scale_place, before, low, high,
         half: gl.constexpr, group: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """The products of a warpgroup's 64 rows and chunks `low` to `high`: float32 [64, BLOCK_M]. before: chunks that the
    program has done. Scales and zeros are asked for a chunk ahead."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    STAGES: gl.constexpr = x_buffers.shape[0]
    RING: gl.constexpr = word_buffers.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    base: gl.constexpr = 0xC300 if half == gl.bfloat16 else 0xE400  # as in `minus_zero`
    eights: gl.constexpr = (base + 8) * 0x10001 - (1 << 32)
    full, empty, words_full, words_empty = barriers
    minus = gl.full([64, 16], eights, gl.int32, word_layout(16, False))
    total = gl.zeros([64, BLOCK_M], gl.float32, layout)
    scale = gl.load(scales + scale_place + low * 128 // GROUP * 64)
    if zeros is not None:
        zero = gl.load(zeros + word_place + low * 128 // GROUP * 64)
    for chunk in range(low, high):
        count = before + chunk - low
        after = gl.minimum(chunk + 1, high - 1) * 128 // GROUP * 64
        by = scale.to(half)[:, None]
        scale = gl.load(scales + scale_place + after)
        if zeros is not None:
            minus, _ = gl.broadcast(((zero.to(gl.int32) | base) * 0x10001).to(gl.int32)[:, None], minus)
            zero = gl.load(zeros + word_place + after)
        slot = count % RING
        mbarrier.wait(words_full.index(slot), (count // RING) & 1)
        words = _words_of(word_buffers.index(slot), group, GATED)
        # All that is multiplied lies ready before the first product begins, or the compiler lets it wait for each.
        a = gl.convert_layout(numbers(words, 0, 2, minus, half, "int4", True), operand, assert_trivial=True)
        c = gl.convert_layout(numbers(words, 1, 2, minus, half, "int4", True), operand, assert_trivial=True)
        a, c = scaled(a, by), scaled(c, by)
        stage, other = 2 * count % STAGES, (2 * count + 1) % STAGES
        mbarrier.wait(full.index(stage), (2 * count // STAGES) & 1)
        mbarrier.wait(full.index(other), ((2 * count + 1) // STAGES) & 1)
        total = warpgroup_mma(a, x_buffers.index(stage).permute([1, 0]), total, is_async=True)
        total = warpgroup_mma(c, x_buffers.index(other).permute([1, 0]), total, is_async=True)
        total = warpgroup_mma_wait(1, [total])
        mbarrier.arrive(words_empty.index(slot), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        total = warpgroup_mma_wait(0, [total])
        mbarrier.arrive(empty.index(other), count=1)
    return total


@gluon.jit
def _joined(product, parts, arrived, shared, span, C, group: gl.constexpr):
    """A program's part of a shared tile -> whether it is the tile's last, and then the sum of all of them, always in
    the same order. The program with the last part waits for the others: they began before it, and compute their parts
    before they wait themselves."""
    BLOCK_M: gl.constexpr = product.shape[1]
    SIZE: gl.constexpr = 64 * BLOCK_M
    layout: gl.constexpr = product.type.layout
    first, last, program = shared * C // span, (shared * C + C - 1) // span, gl.program_id(0)
    counter = arrived + shared * 2 + group
    if first < last:
        flat = flattened(product)
        offsets = gl.arange(0, SIZE, flat.type.layout)
        if program < last:
            gl.store(parts + (program * 2 + group) * SIZE + offsets, flat)
            gl.thread_barrier()
            gl.atomic_add(counter, 1, sem="release")
        else:
            while gl.atomic_add(counter, 0, sem="acquire") < last - first:
                pass
            gl.store(counter, 0)
            for other in range(first, last):
                flat += gl.load(parts + (other * 2 + group) * SIZE + offsets, cache_modifier=".cg")
            product = unflattened(flat, BLOCK_M, layout)
    return program == last, product


@gluon.jit
def _store(product, bias, residual, out, across, line, M, N, GATED: gl.constexpr):
    """What follows the product of a warpgroup's rows and the rows of x from `line` on, 64 at a time."""
    BLOCK_M: gl.constexpr = product.shape[1]
    if BLOCK_M > 64:
        low, high = gl.split(product.reshape([64, 2, BLOCK_M // 2]).permute([0, 2, 1]))
        _store(low, bias, residual, out, across, line, M, N, GATED)
        _store(high, bias, residual, out, across, line + BLOCK_M // 2, M, N, GATED)
    else:
        OUTPUTS: gl.constexpr = 32 if GATED else 64
        memory: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 32, 64 // OUTPUTS * 16], [4, 1], [0, 1])
        if GATED:
            gate, up = gl.split(product.reshape([4, 2, 8, BLOCK_M]).permute([0, 2, 3, 1]))
            product = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, BLOCK_M])
        columns = across * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, memory))
        lines = line + gl.arange(0, BLOCK_M, gl.SliceLayout(0, memory))
        store_lines(product, bias, residual, out, columns, lines, M, N, memory)


@gluon.jit
def _consume(x_buffers, word_buffers, barriers, scales, zeros, bias, residual, out, parts, arrived, plan, sides,
             span, M, N, C, groups, group: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """64 rows of W in each of the program's tiles."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    half: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    word_rows = gl.arange(0, 64, gl.SliceLayout(1, word_layout(16, False)))
    scale_rows = gl.arange(0, 64, gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2)))
    before = 0
    for index in range(_pieces(plan)):
        tile, shared, low, high = _piece(index, plan)
        across, line = _place(tile, sides)
        across = across * 2 + group
        word_place = _places(across * 64 + word_rows, groups, N, GATED)
        scale_place = _places(across * 64 + scale_rows, groups, N, GATED)
        product = _sum(x_buffers, word_buffers, barriers, scales, zeros, word_place, scale_place, before, low, high,
                       half, group, GROUP, GATED)  # fmt: skip
        before += high - low
        done = True
        if shared >= 0:
            done, product = _joined(product, parts, arrived, shared, span, C, group)
        if done:
            _store(product, bias, residual, out, across, line * BLOCK_M, M, N, GATED)


@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(found.index(place), count=arrivals)
    return found


@gluon.jit(do_not_specialize=["M", "C", "groups", "alone", "span", "units", "down", "band", "across"])
def prompt_words_kernel(
    x,  # descriptor of [M, K], boxes [BLOCK_M, 64]
    words,  # descriptor of int32 [T * C * 64, 16], boxes [64, 16]; GATED: of [2N, K], the gates and then the ups
    scales,  # [T, groups, 64]
    zeros,  # uint8 [T, groups, 64] or None
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    parts,  # float32 [programs, 2, BLOCK_M, 64]
    arrived,  # int32 [shared tiles * 2], zero between launches
    M, N, C, groups, alone, span, units, down, band, across,
    GROUP: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """`alone` tiles are computed by one program each, in turn; of the others' `units` chunks, laid end to end, program
    p computes p * span to (p + 1) * span. `down` tiles have the same rows of W, `across` the same of x, in the order of
    `_place`: bands of `band`."""
    x_buffers = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 64], x.layout)
    word_buffers = gl.allocate_shared_memory(gl.int32, [RING, 128, 16], words.layout)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    words_full, words_empty = _barriers(RING, 1), _barriers(RING, 2)
    barriers = (full, empty, words_full, words_empty)
    plan, sides = (alone, span, units, C), (down, band, across)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (x_buffers, word_buffers, barriers, scales, zeros, bias, residual, out, parts, arrived, plan,
                        sides, span, M, N, C, groups, 0, GROUP, GATED)),
            (_consume, (x_buffers, word_buffers, barriers, scales, zeros, bias, residual, out, parts, arrived, plan,
                        sides, span, M, N, C, groups, 1, GROUP, GATED)),
            (_fetch_words, (words, word_buffers, words_full, words_empty, plan, sides, N, C, GATED)),
            (_fetch_rows, (x, x_buffers, full, empty, plan, sides)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
