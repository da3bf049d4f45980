"""Linear layers of many rows with packed 4-bit weights on a Hopper: y = x W^T, in Gluon.

As `kernels.linear.packed_hopper_kernel`, in tiles of 128 rows of W and 128 to 320 rows of x: one warp loads words and
another rows of x; two warpgroups convert 64 rows of words each to scaled 16-bit floats in registers and multiply. Tiles
that form whole rounds of all multiprocessors are computed by one program each; the remaining ones may be shared in
equal parts.
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

from kernels.linear.gluon_common import added_lines, flattened, scaled, store_lines, unflattened
from kernels.linear.packed import numbers
from kernels.linear.packed_hopper_kernel import packed_layout


@gluon.jit
def _pieces(plan):
    """Number of tiles and pieces of tiles that this program computes."""
    alone, span, units, C = plan
    whole = (alone - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    start = gl.program_id(0) * span
    end = gl.minimum(start + span, units)
    return whole + gl.maximum((end + C - 1) // C - start // C, 0)


@gluon.jit
def _piece(index, plan):
    """-> a tile, its index among the shared tiles (below 0: not shared), and its chunks `low` to `high`.

    First come whole tiles, dealt to all programs in turn; then the program's share of the other tiles, its end first.
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
    """-> position of a tile across (rows of W) and down (rows of x). Tiles come in bands of `band` tiles of x, each
    with all rows of W."""
    down, band, across = sides
    above = tile // (band * across) * band
    height = gl.minimum(band, down - above)
    within = tile - above * across
    return within // height, above + within % height


@gluon.jit
def _fetch_packed(packed, buffers, full, empty, plan, sides, N, C, GATED: gl.constexpr):
    """Producer: load 128 rows of words for each chunk; GATED: 64 gates and 64 ups."""
    RING: gl.constexpr = buffers.shape[0]
    halves = buffers._reinterpret(gl.int32, [2 * RING, 64, 16], packed.layout)
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
            tma.async_copy_global_to_shared(packed, [(first * C + chunk) * 64, 0], full.index(slot), place)
            place = halves.index(2 * slot + 1)
            tma.async_copy_global_to_shared(packed, [(second * C + chunk) * 64, 0], full.index(slot), place)
            count += 1


@gluon.constexpr_function
def rows_of(x_buffers):
    """Rows of x in a tile."""
    return sum(buffers.shape[1] for buffers in x_buffers)


@gluon.jit
def _fetch_rows(boxes, x_buffers, full, empty, plan, sides):
    """Producer: load the rows of x for each chunk, in two panels of 64 columns. boxes: one descriptor per x buffer."""
    STAGES: gl.constexpr = x_buffers[0].shape[0]
    ROWS: gl.constexpr = rows_of(x_buffers)
    gdc_wait()
    count = 0
    for index in range(_pieces(plan)):
        tile, _, low, high = _piece(index, plan)
        _, line = _place(tile, sides)
        for panel in range(2 * low, 2 * high):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), ROWS * 128)
            for which in gl.static_range(len(boxes)):
                row, place = line * ROWS + which * x_buffers[0].shape[1], x_buffers[which].index(stage)
                tma.async_copy_global_to_shared(boxes[which], [row, panel * 64], full.index(stage), place)
            count += 1


@gluon.jit
def _places(rows, groups, N, GATED: gl.constexpr):
    """Offsets of the rows' first scales. rows: in the order of the tiles; GATED: of 16 the first 8 are gates."""
    if GATED:
        rows = rows // 16 * 8 + rows % 8 + rows % 16 // 8 * N
    rows = gl.minimum(rows, (2 * N if GATED else N) - 1)
    return rows // 64 * groups * 64 + rows % 64


@gluon.jit
def _packed_of(buffer, group: gl.constexpr, GATED: gl.constexpr):
    """A warpgroup's words of one chunk, in the threads that multiply them: [64, 16]; GATED: of 16 rows the first 8 are
    gates, the others ups."""
    wanted: gl.constexpr = packed_layout(16, False)
    if GATED:
        half: gl.constexpr = packed_layout(16, True)
        both = gl.join(buffer.slice(32 * group, 32).load(half), buffer.slice(64 + 32 * group, 32).load(half))
        both = both.reshape([4, 8, 16, 2]).permute([0, 3, 1, 2]).reshape([64, 16])
        found = gl.convert_layout(both, wanted, assert_trivial=True)
    else:
        found = buffer.slice(64 * group, 64).load(wanted)
    return found


@gluon.constexpr_function
def sums_layout(rows):
    """How a warpgroup holds the products of its 64 rows of W and `rows` rows of x."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def _nothing(buffers):
    """A zero accumulator for the rows of x in these buffers."""
    ROWS: gl.constexpr = buffers.shape[1]
    return gl.zeros([64, ROWS], gl.float32, sums_layout(ROWS))


@gluon.jit
def _multiply(a, x_buffers, panel, sums):
    """Start adding a panel's products to each of the sums."""
    found = sums[:0]
    for which in gl.static_range(len(sums)):
        b = x_buffers[which].index(panel).permute([1, 0])
        found += (warpgroup_mma(a, b, sums[which], is_async=True),)
    return found


@gluon.jit
def _await(panels: gl.constexpr, sums):
    """Wait until at most the products of the last `panels` panels are in flight, and return the sums."""
    found = warpgroup_mma_wait(panels * len(sums), sums)
    return (found,) if len(sums) == 1 else found


@gluon.jit
def _sum(x_buffers, packed_buffers, barriers, scales, zeros, packed_place, scale_place, before, low, high,
         half: gl.constexpr, group: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """The products of a warpgroup's 64 rows and chunks `low` to `high`, for each of x_buffers its rows: float32 [64,
    rows]. before: chunks that the program has completed. Scales and zeros are loaded one chunk ahead."""
    STAGES: gl.constexpr = x_buffers[0].shape[0]
    RING: gl.constexpr = packed_buffers.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout(x_buffers[0].shape[1]), 2)
    base: gl.constexpr = 0xC300 if half == gl.bfloat16 else 0xE400  # as in `minus_zero`
    eights: gl.constexpr = (base + 8) * 0x10001 - (1 << 32)
    full, empty, packed_full, packed_empty = barriers
    minus = gl.full([64, 16], eights, gl.int32, packed_layout(16, False))
    sums = [_nothing(buffers) for buffers in x_buffers]
    scale = gl.load(scales + scale_place + low * 128 // GROUP * 64)
    if zeros is not None:
        zero = gl.load(zeros + packed_place + low * 128 // GROUP * 64)
    for chunk in range(low, high):
        count = before + chunk - low
        after = gl.minimum(chunk + 1, high - 1) * 128 // GROUP * 64
        by = scale.to(half)[:, None]
        scale = gl.load(scales + scale_place + after)
        if zeros is not None:
            minus, _ = gl.broadcast(((zero.to(gl.int32) | base) * 0x10001).to(gl.int32)[:, None], minus)
            zero = gl.load(zeros + packed_place + after)
        slot = count % RING
        mbarrier.wait(packed_full.index(slot), (count // RING) & 1)
        packed = _packed_of(packed_buffers.index(slot), group, GATED)
        # All operands are ready before the first product begins; otherwise the compiler waits after each.
        a = gl.convert_layout(numbers(packed, 0, 2, minus, half, "int4", True), operand, assert_trivial=True)
        c = gl.convert_layout(numbers(packed, 1, 2, minus, half, "int4", True), operand, assert_trivial=True)
        a, c = scaled(a, by), scaled(c, by)
        stage, other = 2 * count % STAGES, (2 * count + 1) % STAGES
        mbarrier.wait(full.index(stage), (2 * count // STAGES) & 1)
        mbarrier.wait(full.index(other), ((2 * count + 1) // STAGES) & 1)
        sums = _multiply(c, x_buffers, other, _multiply(a, x_buffers, stage, sums))
        sums = _await(1, sums)
        mbarrier.arrive(packed_empty.index(slot), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        sums = _await(0, sums)
        mbarrier.arrive(empty.index(other), count=1)
    return sums


@gluon.jit
def _slices(product):
    """A sum in slices of 64 rows of x: [64, 64] each."""
    if product.shape[1] > 64:
        low, high = gl.split(product.reshape([64, 2, product.shape[1] // 2]).permute([0, 2, 1]))
        found = _slices(low) + _slices(high)
    else:
        found = (product,)
    return found


@gluon.jit
def _sharers(shared, span, C):
    """The first and the last program that have parts of a shared tile."""
    return shared * C // span, (shared * C + C - 1) // span


@gluon.jit
def _owner(which: gl.constexpr, first, last, span, C):
    """The program that adds up this slice of a tile that programs `first` to `last` share. If each has parts of this
    tile only, they own slices in turn; otherwise the last owns all, since it has computed its other parts before."""
    return gl.where(C % span == 0, first + which % (last - first + 1), last)


@gluon.jit
def _keep(part, place, wanted):
    """Store a slice of a part in memory."""
    flat = flattened(part)
    offsets = gl.arange(0, 64 * 64, flat.type.layout)
    gl.store(place + offsets, flat, mask=wanted)


@gluon.jit
def _add_kept(part, place, wanted):
    """The sum of the slice and the one that `_keep` stored."""
    layout: gl.constexpr = part.type.layout
    flat = flattened(part)
    offsets = gl.arange(0, 64 * 64, flat.type.layout)
    flat += gl.load(place + offsets, mask=wanted, other=0.0, cache_modifier=".cg")
    return unflattened(flat, 64, layout)


@gluon.jit
def _joined(slices, parts, arrived, first, last, span, C, group: gl.constexpr):
    """Slices of a program's part of a tile that programs `first` to `last` share -> the same; the slices that it owns
    hold the sums of all parts, always in the same order.

    Owners wait for the other programs' parts. This cannot deadlock: a program waits only after it has stored its own
    part, and all run at the same time because there are at most as many as multiprocessors. A single owner resets the
    counter here; several owners reset it in `_leave`.
    """
    COUNT: gl.constexpr = len(slices)
    program, together = gl.program_id(0), C % span == 0
    mine = parts + (program * 2 + group) * (COUNT * 4096)
    for which in gl.static_range(COUNT):
        _keep(slices[which], mine + which * 4096, _owner(which, first, last, span, C) != program)
    gl.thread_barrier()
    awaited = last - first + together.to(gl.int32)
    if together | (program < last):
        gl.atomic_add(arrived, 1, sem="release")
    if together | (program == last):
        while gl.atomic_add(arrived, 0, sem="acquire") < awaited:
            pass
        if not together:
            gl.store(arrived, 0)
        for other in range(first, first + awaited):
            place = parts + (other * 2 + group) * (COUNT * 4096)
            slices = _added(slices, place, other, first, last, span, C)
    return slices


@gluon.jit
def _leave(arrived, first, last):
    """Programs `first` to `last` all own slices: the last one to arrive here resets the counter."""
    sharers = last - first + 1
    if gl.atomic_add(arrived, 1, sem="relaxed") == 2 * sharers - 1:
        gl.store(arrived, 0)


@gluon.jit
def _added(slices, place, other, first, last, span, C):
    """Add another program's part to the slices that this program owns."""
    found = slices[:0]
    for which in gl.static_range(len(slices)):
        wanted = (_owner(which, first, last, span, C) == gl.program_id(0)) & (other != gl.program_id(0))
        found += (_add_kept(slices[which], place + which * 4096, wanted),)
    return found


@gluon.jit
def _store(product, bias, residual, out, across, line, M, N, GATED: gl.constexpr):
    """Epilogue of a warpgroup's rows of W and 64 rows of x from `line` on."""
    OUTPUTS: gl.constexpr = 32 if GATED else 64
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 32, 64 // OUTPUTS * 16], [4, 1], [0, 1])
    if GATED:
        gate, up = gl.split(product.reshape([4, 2, 8, 64]).permute([0, 2, 3, 1]))
        product = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, 64])
    columns = across * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, memory))
    lines = line + gl.arange(0, 64, gl.SliceLayout(0, memory))
    added = None
    if bias is not None or residual is not None:
        added = added_lines(bias, residual, columns, lines, M, N)
    store_lines(product, added, out, columns, lines, M, N, memory)


@gluon.jit
def _consume(x_buffers, packed_buffers, barriers, scales, zeros, bias, residual, out, parts, arrived, plan, sides,
             span, M, N, C, groups, group: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """Consumer: compute 64 rows of W in each of the program's tiles."""
    half: gl.constexpr = out.dtype.element_ty
    packed_row = gl.arange(0, 64, gl.SliceLayout(1, packed_layout(16, False)))
    scale_rows = gl.arange(0, 64, gl.SliceLayout(1, gl.DotOperandLayout(0, sums_layout(x_buffers[0].shape[1]), 2)))
    before = 0
    for index in range(_pieces(plan)):
        tile, shared, low, high = _piece(index, plan)
        across, line = _place(tile, sides)
        across = across * 2 + group
        packed_place = _places(across * 64 + packed_row, groups, N, GATED)
        scale_place = _places(across * 64 + scale_rows, groups, N, GATED)
        sums = _sum(x_buffers, packed_buffers, barriers, scales, zeros, packed_place, scale_place, before, low, high,
                    half, group, GROUP, GATED)  # fmt: skip
        before += high - low
        slices = _slices(sums[0])
        if len(sums) == 2:
            slices += _slices(sums[1])
        first, last = gl.program_id(0), gl.program_id(0)
        if shared >= 0:
            first, last = _sharers(shared, span, C)
        if first < last:
            slices = _joined(slices, parts, arrived + shared * 2 + group, first, last, span, C, group)
        for which in gl.static_range(len(slices)):
            if _owner(which, first, last, span, C) == gl.program_id(0):
                row = line * rows_of(x_buffers) + which * 64
                _store(slices[which], bias, residual, out, across, row, M, N, GATED)
        if (first < last) & (C % span == 0):
            _leave(arrived + shared * 2 + group, first, last)


@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(found.index(place), count=arrivals)
    return found


@gluon.jit
def _room(box, STAGES: gl.constexpr):
    """Shared memory for STAGES boxes."""
    ROWS: gl.constexpr = box.block_type.shape[0]
    return gl.allocate_shared_memory(box.dtype, [STAGES, ROWS, 64], box.layout)


@gluon.jit(do_not_specialize=["M", "C", "groups", "alone", "span", "units", "down", "band", "across"])
def packed_prefill_kernel(
    x,  # descriptor of [M, K], boxes [BLOCK_M, 64]
    x_tail,  # the same in boxes [TAIL, 64], the rest of a tile's rows; or None
    packed,  # descriptor of int32 [T * C * 64, 16], boxes [64, 16]; GATED: of [2N, K], the gates and then the ups
    scales,  # [T, groups, 64]
    zeros,  # uint8 [T, groups, 64] or None
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    parts,  # float32 [programs, 2, BLOCK_M + TAIL, 64]
    arrived,  # int32 [shared tiles * 2], zero between launches
    M, N, C, groups, alone, span, units, down, band, across,
    GROUP: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """`alone` tiles are computed by one program each, in turn. The chunks of the other tiles form one list of `units`,
    of which program p computes p * span to (p + 1) * span. `down` tiles have the same rows of W, `across` tiles the
    same rows of x, in the order of `_place`: bands of `band`."""
    boxes = (x,) if x_tail is None else (x, x_tail)
    x_buffers = [_room(each, STAGES) for each in boxes]
    packed_buffers = gl.allocate_shared_memory(gl.int32, [RING, 128, 16], packed.layout)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    packed_full, packed_empty = _barriers(RING, 1), _barriers(RING, 2)
    barriers = (full, empty, packed_full, packed_empty)
    plan, sides = (alone, span, units, C), (down, band, across)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (x_buffers, packed_buffers, barriers, scales, zeros, bias, residual, out, parts, arrived, plan,
                        sides, span, M, N, C, groups, 0, GROUP, GATED)),
            (_consume, (x_buffers, packed_buffers, barriers, scales, zeros, bias, residual, out, parts, arrived, plan,
                        sides, span, M, N, C, groups, 1, GROUP, GATED)),
            (_fetch_packed, (packed, packed_buffers, packed_full, packed_empty, plan, sides, N, C, GATED)),
            (_fetch_rows, (boxes, x_buffers, full, empty, plan, sides)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
