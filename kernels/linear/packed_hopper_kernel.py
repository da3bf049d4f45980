"""Linear layers of few rows with packed 4-bit or 8-bit weights on a Hopper: y = x W^T, in Gluon.

Two warps load words, scales and rows of x by the bulk copy engine (TMA), each a box of 64 rows of W; two warpgroups
convert 64 rows of words each to 16-bit floats in the registers from which tensor cores read them. HALVED: 32 rows are
of one box and 32 of the next (gates and ups, or the halves of a head). Names as in `kernels.linear.packed_gemm`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.gluon_common import added_lines, angles_of, joined, scaled, store_lines, store_rotated
from kernels.linear.packed import minus_zero, numbers


@gluon.jit
def _fetch_packed(packed, scales, packed_buffers, scale_buffers, full, stage, across, chunk, N, C, groups,
                 box: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
                 GATED: gl.constexpr):  # fmt: skip
    """Load the words of a chunk and their scales, of one box. GATED: boxes of gates and of ups alternate."""
    row = (across * GROUPS + box) * 64
    if GATED:
        row = (across * (GROUPS // 2) + box // 2) * 64 + box % 2 * N
    place = stage * GROUPS + box
    buffer = packed_buffers.index(place)
    if KIND == "int4":
        tma.async_copy_global_to_shared(packed, [(row // 64 * C + chunk) * 32, 0], full.index(stage), buffer)
    else:
        tma.async_copy_global_to_shared(packed, [row, chunk * packed.block_type.shape[1]], full.index(stage), buffer)
    if GROUP > 0:
        line = row // 64 * groups + chunk * 128 // GROUP
        tma.async_copy_global_to_shared(scales, [line * 64], full.index(stage), scale_buffers.index(place))


@gluon.jit
def _fetch_rows(x, buffers, full, stage, line, chunk, box: gl.constexpr, GROUPS: gl.constexpr):
    """Load a share of the rows of x for one chunk, in panels of 128 bytes."""
    WIDTH: gl.constexpr = buffers.shape[2]
    PANELS: gl.constexpr = 128 // WIDTH
    for panel in gl.static_range(box, PANELS, GROUPS):
        place, column = buffers.index(stage * PANELS + panel), (chunk * PANELS + panel) * WIDTH
        tma.async_copy_global_to_shared(x, [line * buffers.shape[1], column], full.index(stage), place)


@gluon.constexpr_function
def stage_bytes(buffers, stages, share=1, of=1):
    """Bytes of one stage of these buffers that warp `share` of `of` loads."""
    size = buffers.numel * buffers.dtype.primitive_bitwidth // 8 // stages
    panels = buffers.shape[0] // stages
    return size // panels * len(range(share, panels, of))


@gluon.jit
def _next(stage, across, line, chunk, C, down, STAGES: gl.constexpr):
    """The next position in the ring and in the list of all tiles' chunks, without divisions: one takes longer than a
    load."""
    wraps = (chunk + 1 == C).to(gl.int32)
    turns = wraps * (line + 1 == down).to(gl.int32)
    around = (stage + 1 == STAGES).to(gl.int32)
    return (stage + 1) * (1 - around), across + turns, (line + wraps) * (1 - turns), (chunk + 1) * (1 - wraps)


@gluon.jit
def _produce(x, packed, scales, x_buffers, packed_buffers, scale_buffers, full, empty, start, end, down, N, C, groups,
             box: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Producer: load a box of chunks `start` to `end` of all tiles' chunks, and a share of x. Words and scales, which
    no kernel writes, are loaded before the previous kernel has ended."""
    SCALES: gl.constexpr = stage_bytes(scale_buffers, STAGES, box, GROUPS) if GROUP > 0 else 0
    PACKED_BYTES: gl.constexpr = stage_bytes(packed_buffers, STAGES, box, GROUPS)
    BYTES: gl.constexpr = stage_bytes(x_buffers, STAGES, box, GROUPS) + PACKED_BYTES + SCALES
    first = gl.minimum(end - start, STAGES)
    tile, chunk = start // C, start % C
    across, line = tile // down, tile % down
    stage = start - start
    ahead, ahead_line, ahead_chunk = across, line, chunk
    for _ in range(first):
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_packed(packed, scales, packed_buffers, scale_buffers, full, stage, ahead, ahead_chunk, N, C, groups, box,
                     KIND, GROUP, GROUPS, GATED)  # fmt: skip
        stage, ahead, ahead_line, ahead_chunk = _next(stage, ahead, ahead_line, ahead_chunk, C, down, STAGES)
    gdc_wait()
    stage = start - start
    for _ in range(first):
        _fetch_rows(x, x_buffers, full, stage, line, chunk, box, GROUPS)
        stage, across, line, chunk = _next(stage, across, line, chunk, C, down, STAGES)
    for count in range(first, end - start):
        mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_packed(packed, scales, packed_buffers, scale_buffers, full, stage, across, chunk, N, C, groups, box,
                     KIND, GROUP, GROUPS, GATED)  # fmt: skip
        _fetch_rows(x, x_buffers, full, stage, line, chunk, box, GROUPS)
        stage, across, line, chunk = _next(stage, across, line, chunk, C, down, STAGES)


@gluon.constexpr_function
def scales_sums(group, block_m):
    """Whether group scales multiply sums instead of weights: with up to 64 rows of x there are fewer sums."""
    return group > 0 and block_m <= 64


@gluon.constexpr_function
def packed_layout(width, halved, lines=False):
    """How the threads of a warpgroup hold [64, width] words; halved: [32, width]; lines: int4 words as stored, two rows
    per line."""
    inner = [[0, 1 << bit] for bit in range(2, width.bit_length() - 1)]
    lanes, warps, tall = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], 64
    if halved:
        warps, tall = [[8, 0], [16, 0]], 32
    else:
        inner = [[8, 0], *inner]
    if lines:
        inner, lanes, warps = ([[r // 2, c + r % 2 * width] for r, c in bases] for bases in (inner, lanes, warps))
        tall, width = tall // 2, 2 * width
    return gl.DistributedLinearLayout(inner, lanes, warps, [], [tall, width])


@gluon.jit
def _box_of(buffer, W: gl.constexpr, HALVED: gl.constexpr):
    """[64, W] words of a box; HALVED: [32, W] of a half."""
    LINES: gl.constexpr = buffer.shape[1] > W
    TALL: gl.constexpr = 32 if HALVED else 64
    found = buffer.load(packed_layout(W, HALVED, LINES))
    if LINES:
        found = gl.convert_layout(found.reshape([TALL, W]), packed_layout(W, HALVED), assert_trivial=True)
    return found


@gluon.jit
def _packed_of(buffers, place, group: gl.constexpr, W: gl.constexpr, HALVED: gl.constexpr):
    """A warpgroup's words of a chunk, in the threads that multiply them: [64, W]. HALVED: of 16 rows the first 8 are of
    one box, the others of the next."""
    if HALVED:
        box = place + group // 2 * 2
        TALL: gl.constexpr = buffers.shape[1] // 2
        left = _box_of(buffers.index(box).slice(group % 2 * TALL, TALL), W, True)
        right = _box_of(buffers.index(box + 1).slice(group % 2 * TALL, TALL), W, True)
        both = gl.join(left, right).reshape([4, 8, W, 2]).permute([0, 3, 1, 2]).reshape([64, W])
        found = gl.convert_layout(both, packed_layout(W, False), assert_trivial=True)
    else:
        found = _box_of(buffers.index(place + group), W, False)
    return found


@gluon.jit
def _scales_of(buffers, place, group: gl.constexpr, HALVED: gl.constexpr, wanted: gl.constexpr):
    """The scales of the same rows: [64, 1], in the layout of their operand."""
    if HALVED:
        half: gl.constexpr = gl.DistributedLinearLayout([], [[0], [0], [1], [2], [4]], [[8], [16]], [], [32])
        box = place + group // 2 * 2
        left = buffers.index(box).slice(group % 2 * 32, 32).load(half)
        right = buffers.index(box + 1).slice(group % 2 * 32, 32).load(half)
        both = gl.join(left, right).reshape([4, 8, 2]).permute([0, 2, 1]).reshape([64])
        found = gl.convert_layout(both, gl.SliceLayout(1, wanted), assert_trivial=True)
    else:
        found = buffers.index(place + group).load(gl.SliceLayout(1, wanted))
    return found[:, None]


@gluon.jit
def _rows_of(across, rows, N, GATED: gl.constexpr, HALVED: gl.constexpr):
    """The rows of W that a warpgroup computes, clamped to the last."""
    if HALVED:
        lane, half = rows // 16 * 8 + rows % 8, rows % 16 // 8
        found = across * 32 + lane + half * N if GATED else across // 2 * 128 + across % 2 * 32 + lane + half * 64
    else:
        found = across * 64 + rows
    return gl.minimum(found, (2 * N if GATED else N) - 1)


@gluon.jit
def _sum_rounded(x_buffers, packed_buffers, full, empty, before, low, high, layout: gl.constexpr, group: gl.constexpr,
                 GROUPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """As `_sum`, of fp8 weights and fp8 rows without conversion."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    total = gl.zeros([64, BLOCK_M], gl.float32, layout)
    for chunk in range(low, high):
        count = before + chunk - low
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        a, b = packed_buffers.index(stage * GROUPS + group), x_buffers.index(stage).permute([1, 0])
        total = warpgroup_mma(a, b, total, is_async=True)
        total = warpgroup_mma_wait(1, [total])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=chunk > low)
    total = warpgroup_mma_wait(0, [total])
    mbarrier.arrive(empty.index((before + high - low - 1) % STAGES), count=1)
    return total


@gluon.jit
def _operands(packed_buffers, scale_buffers, zeros, place, zero_place, layout: gl.constexpr, half: gl.constexpr,
              group: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ON_SUMS: gl.constexpr,
              HALVED: gl.constexpr):  # fmt: skip
    """A chunk's two halves in the tensor cores' operand layout, and its scales if they multiply sums."""
    W: gl.constexpr = 16 if KIND == "int4" else 32
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    base: gl.constexpr = 0xC308C308 - (1 << 32) if half == gl.bfloat16 else 0xE408E408 - (1 << 32)
    minus = gl.full([64, W], base, gl.int32, packed_layout(W, False))
    if KIND == "int4" and zeros is not None:
        minus, _ = gl.broadcast(minus_zero(zeros, zero_place, half), minus)
    packed = _packed_of(packed_buffers, place, group, W, HALVED)
    a = gl.convert_layout(numbers(packed, 0, 2, minus, half, KIND, True), operand, assert_trivial=True)
    c = gl.convert_layout(numbers(packed, 1, 2, minus, half, KIND, True), operand, assert_trivial=True)
    if ON_SUMS:
        scale = _scales_of(scale_buffers, place, group, HALVED, layout).to(gl.float32)
    else:
        scale = 1.0
        if GROUP > 0:
            by = _scales_of(scale_buffers, place, group, HALVED, operand).to(half)
            a, c = scaled(a, by), scaled(c, by)
    return a, c, scale


@gluon.constexpr_function
def alone(block_m):
    """Whether warps multiply separately: a warpgroup instruction takes as long for 8 rows of x as for more."""
    return block_m <= 8


@gluon.constexpr_function
def sums_layout(block_m, rounded):
    """How a warpgroup holds [64, block_m] sums."""
    if alone(block_m) and not rounded:
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32 if rounded else 16])


@gluon.jit
def _sum(x_buffers, packed_buffers, scale_buffers, full, empty, zeros, before, low, high, packed_place,
         layout: gl.constexpr, half: gl.constexpr, group: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
         HALVED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The products of a warpgroup's 64 rows and chunks `low` to `high`, float32 [64, BLOCK_M]; scaled unless all
    inputs share a scale. before: chunks that the program has completed. While one warpgroup converts words, the other
    multiplies."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    ON_SUMS: gl.constexpr = scales_sums(GROUP, BLOCK_M)
    total = gl.zeros([64, BLOCK_M], gl.float32, layout)
    for chunk in range(low, high):
        count = before + chunk - low
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        # All operands are ready before the first product begins; otherwise the compiler waits after each.
        zero_place = packed_place + chunk * 128 // GROUP * 64 if GROUP > 0 else packed_place
        a, c, scale = _operands(
            packed_buffers, scale_buffers, zeros, stage * GROUPS, zero_place, layout, half, group, KIND, GROUP, ON_SUMS,
            HALVED,
        )  # fmt: skip
        b, d = x_buffers.index(2 * stage).permute([1, 0]), x_buffers.index(2 * stage + 1).permute([1, 0])
        sums = gl.zeros([64, BLOCK_M], gl.float32, layout) if ON_SUMS else total
        if alone(BLOCK_M):
            right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
            b, d = b.load(right), d.load(right)
            fence_async_shared()  # The copy engine could overwrite what loads in flight have not read yet.
            mbarrier.arrive(empty.index(stage), count=1)
            sums = mma_v2(c, d, mma_v2(a, b, sums))
        else:
            sums = warpgroup_mma(a, b, sums, use_acc=not ON_SUMS, is_async=True)
            sums = warpgroup_mma(c, d, sums, is_async=True)
            sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(empty.index(stage), count=1)
        total = total + sums * scale if ON_SUMS else sums
    return total


@gluon.jit
def _consume(x_buffers, packed_buffers, scales, full, empty, zeros, x_scales, bias, residual, out, cos,
             sin, positions, kv, slot_mapping, parts, arrived, start, end, span, down, M, N, C, groups, H, G,
             group: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Consumer: compute 64 rows of W in each of the program's tiles."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    half: gl.constexpr = out.dtype.element_ty
    ROTATED: gl.constexpr = kv is not None
    HALVED: gl.constexpr = GATED or ROTATED
    ROUNDED: gl.constexpr = x_buffers.shape[2] == 128
    OUTPUTS: gl.constexpr = 32 if HALVED else 64
    layout: gl.constexpr = sums_layout(BLOCK_M, ROUNDED)
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 32, 64 // OUTPUTS * 16], [4, 1], [0, 1])
    lines = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    lanes = gl.arange(0, OUTPUTS, gl.SliceLayout(1, memory))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    packed_row = gl.arange(0, 64, gl.SliceLayout(1, packed_layout(16 if KIND == "int4" else 32, False)))
    for tile in range(start // C, (end + C - 1) // C):
        low, high = gl.maximum(start, tile * C), gl.minimum(end, tile * C + C)
        before, low, high = low - start, low - tile * C, high - tile * C
        across = tile // down * GROUPS + group
        line = tile % down * BLOCK_M
        packed_row_of = _rows_of(across, packed_row, N, GATED, HALVED)
        packed_place = packed_row_of // 64 * groups * 64 + packed_row_of % 64
        if GROUP == 0:
            row = _rows_of(across, rows, N, GATED, HALVED)
            scale = gl.load(scales + row).to(gl.float32)[:, None]
        if ROUNDED:
            product = _sum_rounded(
                x_buffers, packed_buffers, full, empty, before, low, high, layout, group, GROUPS, STAGES
            )
        else:
            product = _sum(
                x_buffers, packed_buffers, scales, full, empty, zeros, before, low, high, packed_place, layout,
                half, group, KIND, GROUP, HALVED, GROUPS, STAGES,
            )  # fmt: skip
        if GROUP == 0:
            product *= scale
        if x_scales is not None:
            product *= gl.load(x_scales + line + lines, mask=line + lines < M, other=0.0)[None, :]
        # Inputs of the epilogue are loaded while the parts are joined.
        places_of = line + gl.arange(0, BLOCK_M, gl.SliceLayout(0, memory))
        columns = across * OUTPUTS + lanes
        added = None
        if ROTATED:
            pairs = across % 2 * 32 + lanes
            cosine, sine, stored_at = angles_of(cos, sin, positions, slot_mapping, places_of, pairs, M, 128)
        elif bias is not None or residual is not None:
            added = added_lines(bias, residual, columns, places_of, M, N)
        first, last = tile * C // span, (tile * C + C - 1) // span
        done = first == last
        if first < last:
            done, product = joined(
                product, parts + group * 64 * BLOCK_M, arrived + tile * GROUPS + group, first, last,
                GROUPS * 64 * BLOCK_M, layout,
            )  # fmt: skip
        if done:
            if HALVED:
                left, right = gl.split(product.reshape([4, 2, 8, BLOCK_M]).permute([0, 2, 3, 1]))
                if ROTATED:
                    left = gl.convert_layout(left.reshape([32, BLOCK_M]), memory)
                    right = gl.convert_layout(right.reshape([32, BLOCK_M]), memory)
                    head = across // 2
                    store_rotated(
                        left, right, cosine, sine, stored_at, bias, kv, out, head, places_of, pairs, M, H, G, 128
                    )
                else:
                    result = (left / (1.0 + gl.exp(-left)) * right).reshape([32, BLOCK_M])
            else:
                result = product
            if not ROTATED:
                store_lines(result, added, out, columns, places_of, M, N, memory)


# A loop of C = 1 does not compile.
@gluon.jit(do_not_specialize=["M", "C", "groups", "H", "G", "span", "units", "down"])
def packed_hopper_kernel(
    x,  # descriptor of [M, K], boxes [BLOCK_M, 128 bytes]
    packed,  # descriptor of int4 [T * C * 32, 32], others [N, C * 32], boxes of 64 rows of W and one chunk
    scales,  # descriptor of [T * groups * 64], boxes [64]; where all inputs share a scale: [T * 64]
    zeros,  # uint8 [T, groups, 64] or None
    x_scales,  # float32 [M] or None: x is fp8
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]; where there is a pool: [M, H, 128]
    cos, sin,  # [positions, 128]; the first half of sin negated
    positions,  # int64 [M]
    kv,  # [blocks * P, 2G, 128] or None: W makes queries, keys and values, which are rotated; N = (H + 2G) * 128
    slot_mapping,  # int64 [M]: block * P + offset; a negative place is not written
    parts,  # float32 [programs, 2, GROUPS, BLOCK_M, 64]
    arrived,  # int32 [tiles * GROUPS], zero between launches
    M, N, C, groups, H, G, span, units, down,
    KIND: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program p computes chunks p * span to (p + 1) * span of all tiles' chunks: each tile's C one after another."""
    start = gl.program_id(0) * span
    end = gl.minimum(start + span, units)
    WIDTH: gl.constexpr = x.block_type.shape[1]
    x_buffers = gl.allocate_shared_memory(x.dtype, [STAGES * (128 // WIDTH), BLOCK_M, WIDTH], x.layout)
    TALL: gl.constexpr = packed.block_type.shape[0]
    W: gl.constexpr = packed.block_type.shape[1]
    packed_buffers = gl.allocate_shared_memory(packed.dtype, [STAGES * GROUPS, TALL, W], packed.layout)
    held = scales
    if GROUP > 0:
        held = gl.allocate_shared_memory(scales.dtype, [STAGES * GROUPS, 64], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=GROUPS)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (x_buffers, packed_buffers, held, full, empty, zeros, x_scales, bias, residual,
                        out, cos, sin, positions, kv, slot_mapping, parts, arrived, start, end, span, down, M, N, C,
                        groups, H, G, 0, KIND, GROUP, GATED, GROUPS, STAGES)),
            (_consume, (x_buffers, packed_buffers, held, full, empty, zeros, x_scales, bias, residual,
                        out, cos, sin, positions, kv, slot_mapping, parts, arrived, start, end, span, down, M, N, C,
                        groups, H, G, 1, KIND, GROUP, GATED, GROUPS, STAGES)),
            (_produce, (x, packed, scales, x_buffers, packed_buffers, held, full, empty, start, end, down, N, C, groups,
                        0, KIND, GROUP, GROUPS, GATED, STAGES)),
            (_produce, (x, packed, scales, x_buffers, packed_buffers, held, full, empty, start, end, down, N, C, groups,
                        1, KIND, GROUP, GROUPS, GATED, STAGES)),
        ],
        [4, 1, 1], [REGISTERS, 24, 24],
    )  # fmt: skip
