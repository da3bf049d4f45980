"""Products with weights of four or eight bits on a Hopper: y = x W^T, in Gluon.

One warp fetches words and rows of x by the bulk copy engine; two warpgroups turn 64 rows of words each into 16-bit
floats in the registers from which the tensor cores take them, and turn the next while these are multiplied. Names as in
`kernels.products.matmul_words`.
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

from kernels.products.gluon_parts import flattened, store_lines, unflattened
from kernels.products.words import minus_zero, numbers


@gluon.jit
def _fetch_words(words, buffers, full, stage, tile, chunk, N, C, KIND: gl.constexpr, GROUPS: gl.constexpr,
                 GATED: gl.constexpr):  # fmt: skip
    """The words of one chunk: 64 rows for each warpgroup; GATED: 32 gates and 32 ups."""
    HEIGHT: gl.constexpr = buffers.shape[1]
    PIECES: gl.constexpr = 2 if GATED else 1
    for group in gl.static_range(GROUPS):
        for piece in gl.static_range(PIECES):
            row = (tile * GROUPS + group) * HEIGHT + piece * N
            place = buffers.index((stage * GROUPS + group) * PIECES + piece)
            if KIND == "int4":
                where = (row // 64 * C + chunk) * 64 + row % 64
                tma.async_copy_global_to_shared(words, [where, 0], full.index(stage), place)
            else:
                column = chunk * words.block_type.shape[1]
                tma.async_copy_global_to_shared(words, [row, column], full.index(stage), place)


@gluon.jit
def _fetch_rows(x, buffers, full, stage, tile, chunk):
    """The rows of x for one chunk, in panels of 128 bytes."""
    WIDTH: gl.constexpr = buffers.shape[2]
    PANELS: gl.constexpr = 128 // WIDTH
    for panel in gl.static_range(PANELS):
        place, column = buffers.index(stage * PANELS + panel), chunk * 128 + panel * WIDTH
        tma.async_copy_global_to_shared(x, [tile * buffers.shape[1], column], full.index(stage), place)


@gluon.jit
def _produce(x, words, x_buffers, word_buffers, full, empty, start, end, down, N, C, KIND: gl.constexpr,
             GROUPS: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fetch chunks `start` to `end` of all tiles' chunks; words, which no kernel writes, before the previous kernel has
    ended."""
    PANELS: gl.constexpr = 128 // x_buffers.shape[2]
    WORDS: gl.constexpr = word_buffers.shape[0] // STAGES * word_buffers.shape[1] * word_buffers.shape[2]
    ROWS: gl.constexpr = x_buffers.shape[1] * x_buffers.shape[2] * PANELS
    BYTES: gl.constexpr = WORDS * (words.dtype.primitive_bitwidth // 8) + ROWS * (x.dtype.primitive_bitwidth // 8)
    first = gl.minimum(end, start + STAGES)
    for unit in range(start, first):
        stage, tile = unit - start, unit // C
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_words(words, word_buffers, full, stage, tile // down, unit % C, N, C, KIND, GROUPS, GATED)
    gdc_wait()
    for unit in range(start, first):
        _fetch_rows(x, x_buffers, full, unit - start, unit // C % down, unit % C)
    for unit in range(first, end):
        count, tile = unit - start, unit // C
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_words(words, word_buffers, full, stage, tile // down, unit % C, N, C, KIND, GROUPS, GATED)
        _fetch_rows(x, x_buffers, full, stage, tile % down, unit % C)


@gluon.constexpr_function
def scales_sums(group, block_m):
    """Whether a group's scale multiplies sums; of more rows than these there are fewer weights than sums."""
    return group > 0 and block_m <= 64


@gluon.constexpr_function
def word_layout(width, halved):
    """How the threads of a warpgroup hold [64, width] words, or [32, width] of which they take rows alone."""
    inner = [[0, 1 << bit] for bit in range(2, width.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    if halved:
        return gl.DistributedLinearLayout(inner, lanes, [[8, 0], [16, 0]], [], [32, width])
    return gl.DistributedLinearLayout([[8, 0], *inner], lanes, [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
def _words_of(buffers, place, GATED: gl.constexpr):
    """A warpgroup's words of one chunk, in the threads that need them: [64, W]. GATED: of 16 rows the first 8 are
    gates, the others ups."""
    W: gl.constexpr = buffers.shape[2]
    wanted: gl.constexpr = word_layout(W, False)
    if GATED:
        half: gl.constexpr = word_layout(W, True)
        both = gl.join(buffers.index(2 * place).load(half), buffers.index(2 * place + 1).load(half))
        both = both.reshape([4, 8, W, 2]).permute([0, 3, 1, 2]).reshape([64, W])
        found = gl.convert_layout(both, wanted, assert_trivial=True)
    else:
        found = buffers.index(place).load(wanted)
    return found


@gluon.jit
def _places(rows, groups, N, GATED: gl.constexpr):
    """Where the scales of a warpgroup's rows begin. rows: as they lie in the tile."""
    if GATED:
        rows = rows // 64 * 32 + rows % 64 // 16 * 8 + rows % 8 + rows % 16 // 8 * N
    rows = gl.minimum(rows, (2 * N if GATED else N) - 1)
    return rows // 64 * groups * 64 + rows % 64


@gluon.jit
def _sum_rounded(x_buffers, word_buffers, full, empty, before, low, high, layout: gl.constexpr, group: gl.constexpr,
                 GROUPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """As `_sum`, of fp8 words and rows as they are."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    total = gl.zeros([64, BLOCK_M], gl.float32, layout)
    for chunk in range(low, high):
        count = before + chunk - low
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        a, b = word_buffers.index(stage * GROUPS + group), x_buffers.index(stage).permute([1, 0])
        total = warpgroup_mma(a, b, total, is_async=True)
        total = warpgroup_mma_wait(1, [total])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=chunk > low)
    total = warpgroup_mma_wait(0, [total])
    mbarrier.arrive(empty.index((before + high - low - 1) % STAGES), count=1)
    return total


@gluon.jit
def _scaled(numbers, by):
    """numbers * by, two at a time."""
    text: gl.constexpr = ("mul.rn.bf16x2" if numbers.dtype == gl.bfloat16 else "mul.rn.f16x2") + " $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [numbers, by], dtype=numbers.dtype, is_pure=True, pack=2)


@gluon.jit
def _sum(x_buffers, word_buffers, full, empty, scales, zeros, before, low, high, word_place, scale_place,
         layout: gl.constexpr, half: gl.constexpr, group: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
         GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The products of a warpgroup's 64 rows and chunks `low` to `high`, float32 [64, BLOCK_M]; scaled unless all
    inputs share a scale. before: chunks that the program has done. While one warpgroup turns words into floats the
    other multiplies."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    W: gl.constexpr = word_buffers.shape[2]
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    ON_SUMS: gl.constexpr = scales_sums(GROUP, BLOCK_M)
    base: gl.constexpr = 0xC308C308 - (1 << 32) if half == gl.bfloat16 else 0xE408E408 - (1 << 32)
    minus = gl.full([64, W], base, gl.int32, word_layout(W, False))
    total = gl.zeros([64, BLOCK_M], gl.float32, layout)
    if GROUP > 0:
        scale = gl.load(scales + scale_place + low * 128 // GROUP * 64)
    for chunk in range(low, high):
        count = before + chunk - low
        stage = count % STAGES
        if GROUP > 0:
            now = scale.to(gl.float32 if ON_SUMS else half)[:, None]
            scale = gl.load(scales + scale_place + gl.minimum(chunk + 1, high - 1) * 128 // GROUP * 64)
        if KIND == "int4" and zeros is not None:
            minus, _ = gl.broadcast(minus_zero(zeros, word_place + chunk * 128 // GROUP * 64, half), minus)
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        words = _words_of(word_buffers, stage * GROUPS + group, GATED)
        # All that is multiplied lies ready before the first product begins, or the compiler lets it wait for each.
        a = gl.convert_layout(numbers(words, 0, 2, minus, half, KIND, True), operand, assert_trivial=True)
        c = gl.convert_layout(numbers(words, 1, 2, minus, half, KIND, True), operand, assert_trivial=True)
        if GROUP > 0 and not ON_SUMS:
            a, c = _scaled(a, now), _scaled(c, now)
        b, d = x_buffers.index(2 * stage).permute([1, 0]), x_buffers.index(2 * stage + 1).permute([1, 0])
        sums = gl.zeros([64, BLOCK_M], gl.float32, layout) if ON_SUMS else total
        sums = warpgroup_mma(a, b, sums, use_acc=not ON_SUMS, is_async=True)
        sums = warpgroup_mma(c, d, sums, is_async=True)
        sums = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(empty.index(stage), count=1)
        total = total + sums * now if ON_SUMS else sums
    return total


@gluon.jit
def _store(product, scales, x_scales, bias, residual, out, across, line, M, N, GROUP: gl.constexpr,
           GATED: gl.constexpr):  # fmt: skip
    """What follows the product of a warpgroup's rows and all rows of x from `line` on."""
    BLOCK_M: gl.constexpr = product.shape[1]
    OUTPUTS: gl.constexpr = 32 if GATED else 64
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 32, 64 // OUTPUTS * 16], [4, 1], [0, 1])
    lines = gl.arange(0, BLOCK_M, gl.SliceLayout(0, product.type.layout))
    if GROUP == 0:
        product *= gl.load(scales).to(gl.float32)[:, None]
    if x_scales is not None:
        product *= gl.load(x_scales + line + lines, mask=line + lines < M, other=0.0)[None, :]
    if GATED:
        gate, up = gl.split(product.reshape([4, 2, 8, BLOCK_M]).permute([0, 2, 3, 1]))
        result = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, BLOCK_M])
    else:
        result = product
    columns = across * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, memory))
    places = line + gl.arange(0, BLOCK_M, gl.SliceLayout(0, memory))
    store_lines(result, bias, residual, out, columns, places, M, N, memory)


@gluon.jit
def _consume(x_buffers, word_buffers, full, empty, scales, zeros, x_scales, bias, residual, out, parts, arrived,
             start, end, span, down, M, N, C, groups, group: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
             GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """64 rows of W in each of the program's tiles."""
    BLOCK_M: gl.constexpr = x_buffers.shape[1]
    SIZE: gl.constexpr = 64 * BLOCK_M
    half: gl.constexpr = out.dtype.element_ty
    ROUNDED: gl.constexpr = x_buffers.shape[2] == 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 if ROUNDED else 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    word_rows_layout: gl.constexpr = gl.SliceLayout(1, word_layout(16 if KIND == "int4" else 32, False))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    word_rows = gl.arange(0, 64, word_rows_layout)
    scale_rows = gl.arange(0, 64, gl.SliceLayout(1, layout if scales_sums(GROUP, BLOCK_M) else operand))
    for tile in range(start // C, (end + C - 1) // C):
        low, high = gl.maximum(start, tile * C), gl.minimum(end, tile * C + C)
        across = tile // down * GROUPS + group
        row_place = _places(across * 64 + rows, groups, N, GATED)
        word_place = _places(across * 64 + word_rows, groups, N, GATED)
        scale_place = _places(across * 64 + scale_rows, groups, N, GATED)
        if ROUNDED:
            product = _sum_rounded(
                x_buffers, word_buffers, full, empty, low - start, low - tile * C, high - tile * C, layout, group,
                GROUPS, STAGES,
            )  # fmt: skip
        else:
            product = _sum(
                x_buffers, word_buffers, full, empty, scales, zeros, low - start, low - tile * C, high - tile * C,
                word_place, scale_place, layout, half, group, KIND, GROUP, GATED, GROUPS, STAGES,
            )  # fmt: skip
        first, last = tile * C // span, (tile * C + C - 1) // span
        done = first == last
        if first < last:
            # Every program leaves its part; the last to arrive adds all of them, always in the same order.
            worker = gl.program_id(0)
            place = parts + ((worker * 2 + (worker == first).to(gl.int32)) * GROUPS + group) * SIZE
            flat = flattened(product)
            flat_layout: gl.constexpr = flat.type.layout
            offsets = gl.arange(0, SIZE, flat_layout)
            gl.store(place + offsets, flat)
            gl.thread_barrier()
            counter = arrived + tile * GROUPS + group
            done = gl.atomic_add(counter, 1, sem="acq_rel") == last - first
            if done:
                gl.store(counter, 0)
                flat = gl.zeros([SIZE], gl.float32, flat_layout)
                for other in range(first, last + 1):
                    place = parts + ((other * 2 + (other == first).to(gl.int32)) * GROUPS + group) * SIZE
                    flat += gl.load(place + offsets, cache_modifier=".cg")
                product = unflattened(flat, BLOCK_M, layout)
        if done:
            _store(product, scales + row_place, x_scales, bias, residual, out, across, tile % down * BLOCK_M, M, N,
                   GROUP, GATED)  # fmt: skip


@gluon.jit(do_not_specialize=["M", "C", "span", "units", "down"])  # a loop of C = 1 does not compile
def hopper_words_kernel(
    x,  # descriptor of [M, K], boxes [BLOCK_M, 128 bytes]
    words,  # descriptor of int4 [T * C * 64, 16], others [N, C * 32], boxes of a warpgroup's rows and one chunk
    scales,  # [T, groups, 64]
    zeros,  # uint8 [T, groups, 64] or None
    x_scales,  # float32 [M] or None: x is fp8
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    parts,  # float32 [programs, 2, GROUPS, BLOCK_M, 64]
    arrived,  # int32 [tiles * GROUPS], zero between launches
    M, N, C, groups, span, units, down,
    KIND: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program p computes chunks p * span to (p + 1) * span of all tiles' chunks: each tile's C one after another."""
    start = gl.program_id(0) * span
    end = gl.minimum(start + span, units)
    x_buffers = gl.allocate_shared_memory(
        x.dtype, [STAGES * (128 // x.block_type.shape[1]), BLOCK_M, x.block_type.shape[1]], x.layout
    )
    PIECES: gl.constexpr = 2 if GATED else 1
    word_buffers = gl.allocate_shared_memory(
        words.dtype, [STAGES * GROUPS * PIECES, 64 // PIECES, words.block_type.shape[1]], words.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (x_buffers, word_buffers, full, empty, scales, zeros, x_scales, bias, residual, out, parts,
                        arrived, start, end, span, down, M, N, C, groups, 0, KIND, GROUP, GATED, GROUPS, STAGES)),
            (_consume, (x_buffers, word_buffers, full, empty, scales, zeros, x_scales, bias, residual, out, parts,
                        arrived, start, end, span, down, M, N, C, groups, 1, KIND, GROUP, GATED, GROUPS, STAGES)),
            (_produce, (x, words, x_buffers, word_buffers, full, empty, start, end, down, N, C, KIND, GROUPS, GATED,
                        STAGES)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
