"""Linear layers of one row or a few on a Hopper: y = x W^T, in Gluon. W has 16-bit floats, or is packed with 4 or 8
bits.

A tile is 16 rows of W: two octets (8 rows each) that need not be adjacent, such as gates and ups, or the halves of a
head. Each tile is computed by one program, so no sum waits for another program: each of its WARPS warps brings chunks
of its own, as 16-bit floats, to the registers from which tensor cores read them, and multiplies them; then the warps'
sums are added. Two more warps load one octet each by the bulk copy engine (TMA). All of x stays in shared memory. Names
as in `kernels.linear.packed_gemm`, and:

    STEPS boxes of CHUNKS chunks in a tile    W words of a row in a chunk: 16 of four bits, 32 of eight
    ROWS of x: 1, 2, 4 or 8, of which M are there; column c of a product belongs to row c % ROWS
    HEAD numbers of a head where queries and keys are rotated, otherwise 0

A chunk of 16-bit floats ("plain") has 64 inputs, a packed one 128.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.gemv.chosen_experts import chosen_keys, divisor_of, expert_of, key_at, score_of
from kernels.linear.gluon_common import angles_of, store_rotated
from kernels.linear.packed import minus_zero, numbers


@gluon.jit
def _octet(tile, N, octet: gl.constexpr, GATED: gl.constexpr, HEAD: gl.constexpr):
    """The first row of W of a tile's octet."""
    if GATED:
        first = tile * 8 + octet * N
    elif HEAD:
        first = tile // (HEAD // 16) * HEAD + tile % (HEAD // 16) * 8 + octet * (HEAD // 2)
    else:
        first = tile * 16 + octet * 8
    return first


@gluon.jit
def _rows_of(tile, places, N, GATED: gl.constexpr, HEAD: gl.constexpr):
    """The rows of W at these places (0 to 15, repeating) of a tile."""
    first, second = _octet(tile, N, 0, GATED, HEAD), _octet(tile, N, 1, GATED, HEAD)
    return first + places % 8 + places // 8 % 2 * (second - first)


# ---- fetching ----


@gluon.jit
def _fetch(packed, scales, packed_buffer, scale_buffer, full, row, first, C, groups, KIND: gl.constexpr,
           GROUP: gl.constexpr):  # fmt: skip
    """Load an octet's words of a box of chunks and their scales."""
    where = [row // 64 * C + first, row % 64 // 2, 0] if KIND == "int4" else [first, row, 0]
    tma.async_copy_global_to_shared(packed, where, full, packed_buffer)
    if GROUP > 0:
        line = row // 64 * groups + first
        tma.async_copy_global_to_shared(scales, [line, row % 64], full, scale_buffer)


@gluon.jit
def _fetch_x(x, boxes, ready, STEPS: gl.constexpr, BOXES: gl.constexpr):
    """Load all of x, with a barrier for each step."""
    PANELS: gl.constexpr = x.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[1]
    for step in range(STEPS):
        mbarrier.expect(ready.index(step), BOXES * PANELS * ROWS * 128)
        for box in gl.static_range(BOXES):
            line = (box * STEPS + step) * PANELS
            tma.async_copy_global_to_shared(x, [line, 0, 0], ready.index(step), boxes.index(step * BOXES + box))


@gluon.jit
def _produce(x, packed, scales, x_boxes, packed_boxes, scale_boxes, full, empty, ready, logits, each, tiles, N, C,
             groups, octet: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
             HEAD: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
             EXPERTS: gl.constexpr, CHOSEN: gl.constexpr):  # fmt: skip
    """Producer: load an octet of the program's tiles. Words and scales, which no kernel writes, are loaded before the
    previous kernel has ended, as many as the buffers hold. The first octet's warp loads x after that."""
    BOX: gl.constexpr = packed.block_type.shape[0]
    SCALES: gl.constexpr = scale_boxes.shape[1] * scale_boxes.dtype.primitive_bitwidth if GROUP > 0 else 0
    BYTES: gl.constexpr = BOXES * (packed_boxes.shape[1] * packed_boxes.shape[2] * 128 + SCALES)
    tile, programs = gl.program_id(0), gl.num_programs(0)
    step, stage, turn = tile - tile, tile - tile, tile - tile
    count = (tiles - tile + programs - 1) // programs * STEPS
    if logits is not None:
        if GATED:
            gdc_wait()
            gdc_launch_dependents()  # The next kernel reads the logits before it waits.
        keys = chosen_keys(logits, EXPERTS, CHOSEN, 1)
    for done in range(count):
        if done >= STAGES:
            mbarrier.wait(empty.index(stage), turn + 1 & 1)
        mbarrier.expect(full.index(stage), BYTES)
        if logits is not None and GATED:
            expert = expert_of(key_at(keys, tile // each, CHOSEN))
            row = _octet(tile % each, N, octet, GATED, HEAD) + expert * (2 * N)
        else:
            row = _octet(tile, N, octet, GATED, HEAD)
        for box in gl.static_range(BOXES):
            here = row
            if logits is not None and not GATED:
                here += expert_of(keys[box]) * N
            place, line = (stage * 2 + octet) * BOXES + box, scale_boxes
            if GROUP > 0:
                line = scale_boxes.index(place)
            _fetch(packed, scales, packed_boxes.index(place), line, full.index(stage), here, step * BOX, C, groups,
                   KIND, GROUP)  # fmt: skip
        if done == gl.minimum(count, STAGES) - 1:
            gdc_wait()
            if octet == 0:
                _fetch_x(x, x_boxes, ready, STEPS, BOXES)
        ends, wraps = (step + 1 == STEPS).to(gl.int32), (stage + 1 == STAGES).to(gl.int32)
        tile, step = tile + ends * programs, (step + 1) * (1 - ends)
        turn, stage = turn + wraps, (stage + 1) * (1 - wraps)


# ---- layouts ----


@gluon.constexpr_function
def _bases(count, rank, place=0, by=1):
    """Bases of a layout along one dimension, in strides from `by` on."""
    return [[0] * place + [by << bit] + [0] * (rank - place - 1) for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def octet_layout(warps, w):
    """How threads hold an octet's words, [warps, 8, w] (int4 as stored, [warps, 4, 32]): four or eight adjacent
    words."""
    inner, across = _bases(w // 4, 3, 2), _bases(4, 3, 2, w // 4)
    down = [*_bases(32 // w, 3, 2, w), *_bases(w // 4, 3, 1)]
    return gl.DistributedLinearLayout(inner, [*across, *down], _bases(warps, 3), [], [warps, w // 4, 32])


@gluon.constexpr_function
def tile_layout(warps, w):
    """How threads hold the words of a tile, [warps * 16, w], in the order in which they are multiplied."""
    inner, lanes = [[8, 0], *_bases(w // 4, 2, 1, 4)], [*_bases(4, 2, 1), *_bases(8, 2)]
    return gl.DistributedLinearLayout(inner, lanes, _bases(warps, 2, 0, 16), [], [warps * 16, w])


@gluon.constexpr_function
def x_layout(warps, w, rows):
    """How threads hold panels of x, [2 * warps, rows, 64]: the numbers that meet their words."""
    inner = [*_bases(w // 2, 3, 2), *_bases(32 // w, 3, 2, 2 * w), [1, 0, 0]]
    lanes = [*_bases(4, 3, 2, w // 2), *_bases(rows, 3, 1), *[[0, 0, 0]] * (3 - len(_bases(rows, 3, 1)))]
    return gl.DistributedLinearLayout(inner, lanes, _bases(warps, 3, 0, 2), [], [2 * warps, rows, 64])


@gluon.constexpr_function
def plain_layout(warps, rows):
    """How threads hold numbers of 16 bits, [warps, rows, 64], rows of W or of x: 16 adjacent ones."""
    lanes = [*_bases(4, 3, 2, 16), *_bases(rows, 3, 1), *[[0, 0, 0]] * (3 - len(_bases(rows, 3, 1)))]
    return gl.DistributedLinearLayout(_bases(16, 3, 2), lanes, _bases(warps, 3), [], [warps, rows, 64])


# ---- multiplying ----


@gluon.jit
def _packed_of(buffer, W: gl.constexpr):
    """An octet's words of WARPS chunks, [WARPS, 8, W], interleaved: the k-th words of all threads are adjacent."""
    WARPS: gl.constexpr = buffer.shape[0]
    found = buffer.load(octet_layout(WARPS, W)).reshape([WARPS, 8, 4, W // 4])
    return found.permute([0, 1, 3, 2]).reshape([WARPS, 8, W])


@gluon.jit
def _x_of(buffer, W: gl.constexpr, right: gl.constexpr):
    """The inputs for the two halves of `numbers`, each [WARPS, 64, 8]: the rows again and again."""
    WARPS: gl.constexpr = buffer.shape[0] // 2
    ROWS: gl.constexpr = buffer.shape[1]
    found = buffer.load(x_layout(WARPS, W, ROWS)).reshape([WARPS, 2, ROWS, 64]).permute([0, 1, 3, 2])
    found = found.reshape([WARPS, 64 // W, 4, W // 4, 2, ROWS]).permute([0, 1, 3, 2, 4, 5])
    low, high = gl.split(found.reshape([WARPS, 2, 64, ROWS]).permute([0, 2, 3, 1]))
    return _in_all_columns(low, right), _in_all_columns(high, right)


@gluon.jit
def _in_all_columns(x, right: gl.constexpr):
    """[WARPS, 64, ROWS] -> [WARPS, 64, 8]."""
    WARPS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[2]
    columns = gl.full([WARPS, 64, 8], 0, x.dtype, right).reshape([WARPS, 64, 8 // ROWS, ROWS])
    one: gl.constexpr = gl.SliceLayout(2, columns.type.layout)
    found, _ = gl.broadcast(gl.convert_layout(x, one, assert_trivial=True)[:, :, None, :], columns)
    return gl.convert_layout(found.reshape([WARPS, 64, 8]), right, assert_trivial=True)


@gluon.jit
def _plain_of(buffer):
    """Numbers of WARPS chunks, [WARPS, rows, 64], in the order in which they are multiplied."""
    WARPS: gl.constexpr = buffer.shape[0]
    rows: gl.constexpr = buffer.shape[1]
    found = buffer.load(plain_layout(WARPS, rows)).reshape([WARPS, rows, 4, 4, 2, 2])
    return found.permute([0, 1, 3, 4, 2, 5]).reshape([WARPS, rows, 64])


@gluon.jit
def _sum_plain(x_buffers, buffers, full, empty, ready, tile, stage, turn, layout: gl.constexpr, STEPS: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """As `_sum`, of weights that are stored as 16-bit floats."""
    WARPS: gl.constexpr = layout.warps_per_cta[0]
    CHUNKS: gl.constexpr = buffers.shape[1]
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    total = gl.zeros([WARPS, 16, 8], gl.float32, layout)
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), turn & 1)
        if tile == gl.program_id(0):
            mbarrier.wait(ready.index(step), 0)
        for low in gl.static_range(0, CHUNKS, WARPS):
            one = _plain_of(buffers.index(stage * 2).slice(low, WARPS))
            other = _plain_of(buffers.index(stage * 2 + 1).slice(low, WARPS))
            x = _plain_of(x_buffers.index(step).slice(low, WARPS)).permute([0, 2, 1])
            if low + WARPS == CHUNKS:
                fence_async_shared()  # The copy engine could overwrite what loads in flight have not read yet.
                mbarrier.arrive(empty.index(stage), count=1)
            a = gl.join(one, other).permute([0, 3, 1, 2]).reshape([WARPS, 16, 64])
            a = gl.convert_layout(a, left, assert_trivial=True)
            total = mma_v2(a, _in_all_columns(x, right), total)
        wraps = (stage + 1 == STAGES).to(gl.int32)
        turn, stage = turn + wraps, (stage + 1) * (1 - wraps)
    return total, stage, turn


@gluon.jit
def _scales_of(left, right, layout: gl.constexpr):
    """The scales of two octets and WARPS chunks, [WARPS, 16, 1]."""
    WARPS: gl.constexpr = left.shape[0]
    octet: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], _bases(WARPS, 2), [], [WARPS, 8]
    )
    both = gl.join(left.load(octet), right.load(octet)).permute([0, 2, 1]).reshape([WARPS, 16])
    return gl.convert_layout(both, gl.SliceLayout(2, layout), assert_trivial=True)[:, :, None].to(gl.float32)


@gluon.jit
def _minus(zeros, tile, chunk, N, groups, half: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr,
           GATED: gl.constexpr, HEAD: gl.constexpr):  # fmt: skip
    """The `minus` of `numbers` for int4 words of chunks from `chunk` on, [WARPS * 16, W]."""
    layout: gl.constexpr = tile_layout(WARPS, W)
    base: gl.constexpr = 0xC308C308 - (1 << 32) if half == gl.bfloat16 else 0xE408E408 - (1 << 32)
    minus = gl.full([WARPS * 16, W], base, gl.int32, layout)
    if zeros is not None:
        places = gl.arange(0, WARPS * 16, gl.SliceLayout(1, layout))
        rows = _rows_of(tile, places, N, GATED, HEAD)
        where = (rows // 64 * groups + chunk + places // 16) * 64 + rows % 64
        minus, _ = gl.broadcast(minus_zero(zeros, where, half), minus)
    return minus


@gluon.jit
def _numbers_of(packed, PART: gl.constexpr, minus, half: gl.constexpr, KIND: gl.constexpr, left: gl.constexpr):
    """Half of the chunks' elements in the tensor cores' operand layout, [WARPS, 16, 64]."""
    found = numbers(packed, PART, 2, minus, half, KIND, True).reshape([packed.shape[0] // 16, 16, 64])
    return gl.convert_layout(found, left, assert_trivial=True)


@gluon.jit
def _sum(x_buffers, packed_buffers, scales, full, empty, ready, zeros, tile, stage, turn, N, groups,
         layout: gl.constexpr, half: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
         HEAD: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Each warp's sums of a tile, [WARPS, 16, 8], scaled unless all inputs share a scale; and the next position in the
    ring buffer."""
    W: gl.constexpr = 16 if KIND == "int4" else 32
    WARPS: gl.constexpr = layout.warps_per_cta[0]
    CHUNKS: gl.constexpr = packed_buffers.shape[1]
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    total = gl.zeros([WARPS, 16, 8], gl.float32, layout)
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), turn & 1)
        if tile == gl.program_id(0):
            mbarrier.wait(ready.index(step), 0)
        for low in gl.static_range(0, CHUNKS, WARPS):
            one = _packed_of(packed_buffers.index(stage * 2).slice(low, WARPS), W)
            other = _packed_of(packed_buffers.index(stage * 2 + 1).slice(low, WARPS), W)
            packed = gl.join(one, other).permute([0, 3, 1, 2]).reshape([WARPS * 16, W])
            packed = gl.convert_layout(packed, tile_layout(WARPS, W), assert_trivial=True)
            if GROUP > 0:
                place = stage * 2
                by = _scales_of(
                    scales.index(place).slice(low, WARPS), scales.index(place + 1).slice(low, WARPS), layout
                )
            b, d = _x_of(x_buffers.index(step).slice(2 * low, 2 * WARPS), W, right)
            if low + WARPS == CHUNKS:
                fence_async_shared()  # The copy engine could overwrite what loads in flight have not read yet.
                mbarrier.arrive(empty.index(stage), count=1)
            minus = _minus(zeros, tile, step * CHUNKS + low, N, groups, half, W, WARPS, GATED, HEAD)
            a = _numbers_of(packed, 0, minus, half, KIND, left)
            c = _numbers_of(packed, 1, minus, half, KIND, left)
            if GROUP > 0:
                none = gl.zeros([WARPS, 16, 8], gl.float32, layout)
                total += mma_v2(a, b, none) * by
                total += mma_v2(c, d, none) * by
            else:
                total = mma_v2(c, d, mma_v2(a, b, total))
        wraps = (stage + 1 == STAGES).to(gl.int32)
        turn, stage = turn + wraps, (stage + 1) * (1 - wraps)
    return total, stage, turn


@gluon.jit
def _sum_of_warps(total, ROWS: gl.constexpr):
    """[WARPS, 16, 8] -> [16, ROWS]."""
    WARPS: gl.constexpr = total.shape[0]
    return gl.sum(gl.sum(total.reshape([WARPS, 16, 8 // ROWS, ROWS]), 2), 0) * (ROWS / 8)


@gluon.jit
def _halves(product):
    """A tile's octets, [16, ROWS] -> [8, ROWS] and [8, ROWS]."""
    ROWS: gl.constexpr = product.shape[1]
    return gl.split(product.reshape([2, 8, ROWS]).permute([1, 2, 0]))


@gluon.jit
def _scales_of_experts(scales, keys, tile, N, BOXES: gl.constexpr, layout: gl.constexpr):
    """The scales of a tile's rows for the expert of each warp, [WARPS, 16, 1]."""
    WARPS: gl.constexpr = layout.warps_per_cta[0]
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    warps = gl.arange(0, WARPS, gl.SliceLayout(1, flat))
    expert = expert_of(key_at(keys, warps // (WARPS // BOXES), BOXES))
    places = tile * 16 + gl.arange(0, 16, gl.SliceLayout(0, flat))
    return gl.load(scales + (expert * N)[:, None] + places[None, :]).to(gl.float32)[:, :, None]


@gluon.jit
def _consume(x_buffers, packed_buffers, scales, full, empty, ready, zeros, bias, residual, out, cos, sin, positions, kv,
             slot_mapping, logits, each, tiles, M, N, groups, H, G, KIND: gl.constexpr, GROUP: gl.constexpr,
             GATED: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
             BOXES: gl.constexpr, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr, NORMALIZED: gl.constexpr):  # fmt: skip
    """Consumer: multiply the program's tiles, add the warps' sums, store."""
    half: gl.constexpr = out.dtype.element_ty
    ROWS: gl.constexpr = x_buffers.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    # The layouts of a tile's results, [16, ROWS], and of an octet of them, [8, ROWS].
    whole: gl.constexpr = _sum_of_warps(gl.zeros([WARPS, 16, 8], gl.float32, layout), ROWS).type.layout
    octet: gl.constexpr = _halves(gl.zeros([16, ROWS], gl.float32, whole))[0].type.layout
    sixteen: gl.constexpr = gl.SliceLayout(1, whole)
    lines = gl.arange(0, ROWS, gl.SliceLayout(0, whole))
    pair_lines = gl.arange(0, ROWS, gl.SliceLayout(0, octet))
    first = gl.program_id(0)
    stage, turn = first - first, first - first
    if logits is not None:
        if GATED:
            gdc_wait()
        keys = chosen_keys(logits, EXPERTS, CHOSEN, WARPS)
        if GATED:
            divisor = divisor_of(logits, keys, EXPERTS, CHOSEN, NORMALIZED, WARPS)
    for tile in range(first, tiles, gl.num_programs(0)):
        rows = _rows_of(tile, gl.arange(0, 16, sixteen), N, GATED, HEAD)
        if logits is not None and GATED:
            key = key_at(keys, tile // each, CHOSEN)
            rows = _rows_of(tile % each, gl.arange(0, 16, sixteen), N, GATED, HEAD) + expert_of(key) * (2 * N)
        SCALED: gl.constexpr = GROUP == 0 and KIND != "plain"
        if SCALED and BOXES == 1:
            scale = gl.load(scales + rows).to(gl.float32)[:, None]
        elif SCALED:
            scale = _scales_of_experts(scales, keys, tile, N, BOXES, layout)
        if KIND == "plain":
            total, stage, turn = _sum_plain(
                x_buffers, packed_buffers, full, empty, ready, tile, stage, turn, layout, STEPS, STAGES
            )  # fmt: skip
        else:
            total, stage, turn = _sum(
                x_buffers, packed_buffers, scales, full, empty, ready, zeros, tile, stage, turn, N, groups, layout,
                half, KIND, GROUP, GATED, HEAD, STEPS, STAGES,
            )  # fmt: skip
        # Inputs of the epilogue are loaded while the warps' sums are added.
        where, valid = lines[None, :] * N + rows[:, None], (lines < M)[None, :]
        if HEAD:
            lanes = tile % (HEAD // 16) * 8 + gl.arange(0, 8, gl.SliceLayout(1, octet))
            cosine, sine, place = angles_of(cos, sin, positions, slot_mapping, pair_lines, lanes, M, HEAD)
        added = gl.zeros([16, ROWS], gl.float32, whole)
        if residual is not None:
            added += gl.load(residual + where, mask=valid, other=0.0).to(gl.float32)
        if bias is not None and not HEAD:
            added += gl.load(bias + rows).to(gl.float32)[:, None]
        if SCALED and BOXES > 1:
            total *= scale
        product = _sum_of_warps(total, ROWS)
        if SCALED and BOXES == 1:
            product *= scale
        if HEAD:
            left, right = _halves(product)
            head = tile // (HEAD // 16)
            store_rotated(left, right, cosine, sine, place, bias, kv, out, head, pair_lines, lanes, M, H, G, HEAD)
        elif GATED:
            gate, up = _halves(product)
            if logits is not None:
                dtype: gl.constexpr = logits.dtype.element_ty
                up *= gl.exp(score_of(key, dtype) - score_of(keys[0], dtype)) / divisor
            column = tile * 8 + gl.arange(0, 8, gl.SliceLayout(1, octet))
            where = pair_lines[None, :] * N + column[:, None]
            gl.store(out + where, (gate / (1.0 + gl.exp(-gate)) * up).to(half), mask=(pair_lines < M)[None, :])
        else:
            gl.store(out + where, (product + added).to(half), mask=valid)


@gluon.jit(do_not_specialize=["M", "C", "groups", "H", "G", "tiles", "each"])
def gemv_kernel(
    x,  # descriptor of [K / 64, M, 64], boxes of a step and ROWS rows
    packed,  # descriptor of int4 [T * C, 32, 32], others [C, N, 32], plain [C, N, 64]; boxes of a step and eight rows
    # of W
    scales,  # descriptor of [T * groups, 64], boxes of a step and eight rows; where all inputs share a scale: [T * 64];
    # plain: None
    zeros,  # uint8 [T, groups, 64] or None
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]; where there is a pool: [M, H, HEAD]
    cos, sin,  # [positions, HEAD]; the first half of sin negated
    positions,  # int64 [M]
    kv,  # [blocks * P, 2G, HEAD] or None: W makes queries, keys and values, which are rotated; N = (H + 2G) * HEAD
    slot_mapping,  # int64 [M]: block * P + offset; a negative place is not written
    logits,  # [EXPERTS] or None: W is that of all experts, of which the CHOSEN likeliest multiply the one row
    each,  # with GATED: tiles of an expert
    M, N, C, groups, H, G, tiles,
    KIND: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, HEAD: gl.constexpr, WARPS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr,
    NORMALIZED: gl.constexpr,
):  # fmt: skip
    """Program p computes tiles p, p + programs and so on."""
    BOX: gl.constexpr = packed.block_type.shape[0]
    TALL: gl.constexpr = packed.block_type.shape[1]
    CHUNKS: gl.constexpr = BOXES * BOX
    WORDS: gl.constexpr = packed.block_type.shape[2]
    PANELS: gl.constexpr = x.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[1]
    x_boxes = gl.allocate_shared_memory(x.dtype, [STEPS * BOXES, PANELS, ROWS, 64], x.layout)
    packed_boxes = gl.allocate_shared_memory(packed.dtype, [STAGES * 2 * BOXES, BOX, TALL, WORDS], packed.layout)
    x_buffers = x_boxes._reinterpret(x.dtype, [STEPS, BOXES * PANELS, ROWS, 64], x.layout)
    packed_buffers = packed_boxes._reinterpret(packed.dtype, [STAGES * 2, CHUNKS, TALL, WORDS], packed.layout)
    scale_boxes, held = scales, scales
    if GROUP > 0:
        scale_boxes = gl.allocate_shared_memory(scales.dtype, [STAGES * 2 * BOXES, BOX, 8], scales.layout)
        held = scale_boxes._reinterpret(scales.dtype, [STAGES * 2, CHUNKS, 8], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=1)
    for step in gl.static_range(STEPS):
        mbarrier.init(ready.index(step), count=1)
    fence_async_shared()
    if logits is None or not GATED:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (x_buffers, packed_buffers, held, full, empty, ready, zeros, bias, residual, out, cos, sin,
                        positions, kv, slot_mapping, logits, each, tiles, M, N, groups, H, G, KIND, GROUP, GATED, HEAD,
                        WARPS, STEPS, STAGES, BOXES, EXPERTS, CHOSEN, NORMALIZED)),
            (_produce, (x, packed, scales, x_boxes, packed_boxes, scale_boxes, full, empty, ready, logits, each, tiles,
                        N, C, groups, 0, KIND, GROUP, GATED, HEAD, STEPS, STAGES, BOXES, EXPERTS, CHOSEN)),
            (_produce, (x, packed, scales, x_boxes, packed_boxes, scale_boxes, full, empty, ready, logits, each, tiles,
                        N, C, groups, 1, KIND, GROUP, GATED, HEAD, STEPS, STAGES, BOXES, EXPERTS, CHOSEN)),
        ],
        [1, 1], [24 if logits is None else 40, 24 if logits is None else 40],
    )  # fmt: skip
