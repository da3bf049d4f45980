"""norm(residual + x W^T + bias) of many rows with 384 inputs and 384 outputs on a Hopper, in Gluon.

As in `kernels.linear.resident_hopper` a program keeps the weights of 128 outputs in shared memory. The three programs
of a lane compute the same rows, and send each other the mean and the sum of squares of their thirds of each row.

    M rows of x    a lane: three programs, side by side in the grid    moments: mean and sum of squares about it

Programs wait for others that may begin after them: a launch must have the GPU's multiprocessors for itself, but for
kernels that end. So it serves no process under MPS.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
from torch import Tensor
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

from kernels.device import processors, under_mps
from kernels.linear import resident_hopper
from kernels.linear.gluon_common import descriptor
from kernels.linear.resident_hopper import INPUTS, SLICE, produce
from kernels.operands import Norm, NormKind

_SLICES = gl.constexpr(3)
_ABSENT = gl.constexpr(-1)
"""A word that was not sent yet. No word of moments has these bits: the upper half would be a NaN that no instruction
returns."""


@gluon.jit
def _send(inbox, mean, squares):
    """Store moments of rows, each pair as one word."""
    upper = mean.to(gl.int32, bitcast=True).to(gl.int64) << 32
    lower = squares.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.store(inbox, upper | lower)


@gluon.jit
def _receive(left, right):
    """Wait for both other programs' words of each thread's two rows, all at once."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred absent;
        .reg .b64 words<4>;
        again:
        ld.relaxed.gpu.global.b64 words0, [$4];
        ld.relaxed.gpu.global.b64 words1, [$5];
        ld.relaxed.gpu.global.b64 words2, [$6];
        ld.relaxed.gpu.global.b64 words3, [$7];
        setp.eq.s64 absent, words0, -1;
        setp.eq.or.s64 absent, words1, -1, absent;
        setp.eq.or.s64 absent, words2, -1, absent;
        setp.eq.or.s64 absent, words3, -1, absent;
        @absent bra again;
        mov.b64 $0, words0;
        mov.b64 $1, words1;
        mov.b64 $2, words2;
        mov.b64 $3, words3;
        }""",
        "=l,=l,=l,=l,l,l,l,l", [left, right], dtype=(gl.int64, gl.int64), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _moments(word):
    """The mean and the sum of squares of a word."""
    return (word >> 32).to(gl.int32).to(gl.float32, bitcast=True), word.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _normalized(sums, scale, shift, inbox, own, eps):
    """The norm of rows, of which this program has the third `own` and the other programs of the lane have the rest.
    Ends behind a barrier."""
    left, right = (own + 2) % 3, (own + 1) % 3
    mean = gl.sum(sums, 1) * (1.0 / 128)
    centered = sums - mean[:, None]
    squares = gl.sum(centered * centered, 1)
    _send(inbox + (left * 3 + own) * 64, mean, squares)
    _send(inbox + (right * 3 + own) * 64, mean, squares)
    from_left, from_right = inbox + (own * 3 + left) * 64, inbox + (own * 3 + right) * 64
    left_word, right_word = _receive(from_left, from_right)
    left_mean, left_squares = _moments(left_word)
    right_mean, right_squares = _moments(right_word)
    whole = (mean + left_mean + right_mean) * (1.0 / 3)
    off, left_off, right_off = mean - whole, left_mean - whole, right_mean - whole
    squares += left_squares + right_squares + 128 * (off * off + left_off * left_off + right_off * right_off)
    inverse = 1.0 / gl.sqrt_rn(squares * (1.0 / 384) + eps)
    result = (sums - whole[:, None]) * inverse[:, None] * gl.load(scale).to(gl.float32)[None, :]
    result += gl.load(shift).to(gl.float32)[None, :]
    gl.thread_barrier()  # All threads have read the words.
    absent = gl.full_like(left_word, _ABSENT)
    gl.store(from_left, absent)
    gl.store(from_right, absent)
    return result


@gluon.jit
def _consume(rows, weights, ready, full, empty, w_full, there, residual, bias, scale, shift, out, inbox, tiles, eps,
             GROUP: gl.constexpr):  # fmt: skip
    """Consumer: a warpgroup computes every other tile of the lane."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    own, step = gl.program_id(0) % _SLICES, gl.num_programs(0) // _SLICES
    columns = own * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))
    lines = gl.arange(0, 64, gl.SliceLayout(1, layout))
    gdc_wait()
    mbarrier.wait(w_full, 0)
    turn = 0
    for tile in range(gl.program_id(0) // _SLICES + GROUP * step, tiles, 2 * step):
        sums = gl.zeros([64, 128], gl.float32, layout)
        for part in gl.static_range(2):
            mbarrier.wait(full.index(GROUP * 2 + part), turn & 1)
            for panel in gl.static_range(3):
                a = rows.index((GROUP * 2 + part) * 3 + panel)
                b = weights.index(part * 3 + panel).permute([1, 0])
                sums = warpgroup_mma(a, b, sums, use_acc=part + panel > 0, is_async=True)
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.expect(there.index(GROUP), 64 * 128 * 2)
        tma.async_copy_global_to_shared(residual, [tile * 64, own * 128], there.index(GROUP), ready.index(GROUP))
        sums = warpgroup_mma_wait(3, [sums])
        mbarrier.arrive(empty.index(GROUP * 2))
        sums = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(empty.index(GROUP * 2 + 1))
        if bias is not None:
            sums += gl.load(bias + columns).to(gl.float32)[None, :]
        mbarrier.wait(there.index(GROUP), turn & 1)
        sums += ready.index(GROUP).load(layout).to(gl.float32)
        sums = _normalized(sums, scale + columns, shift + columns, inbox + tile * (9 * 64) + lines, own, eps)
        ready.index(GROUP).store(sums.to(ready.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [tile * 64, own * 128], ready.index(GROUP))
        turn += 1  # noqa: SIM113 (kernels have no enumerate)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "eps"])
def resident_norm_hopper_kernel(
    x,  # descriptor of [M, 384], boxes [64, 64]
    w,  # descriptor of [384, 384], boxes [128, 64]
    bias,  # [384] or None
    residual,  # descriptor of [M, 384], boxes [64, 128]
    scale, shift,  # [384]: the norm's
    out,  # descriptor of [M, 384], boxes [64, 128]; may be that of the residual
    inbox,  # int64 [tiles, 3, 3, 64]: what program i of a lane gets from j; all _ABSENT between launches
    tiles, eps,
):  # fmt: skip
    """Program p has slice p % 3 of the outputs and an equal share of the tiles of 64 rows. There are at most as many
    programs as multiprocessors, so that all of them run at the same time."""
    rows = gl.allocate_shared_memory(x.dtype, [12, 64, 64], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [6, 128, 64], w.layout)
    ready = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(4):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
    for group in gl.static_range(2):
        mbarrier.init(there.index(group), count=1)
    mbarrier.init(w_full, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (rows, weights, ready, full, empty, w_full, there, residual, bias, scale, shift, out, inbox,
                        tiles, eps, 0)),
            (_consume, (rows, weights, ready, full, empty, w_full, there, residual, bias, scale, shift, out, inbox,
                        tiles, eps, 1)),
            (produce, (x, w, rows, weights, full, empty, w_full, tiles, _SLICES)),
        ],
        [4, 1],
        [200, 24],
    )  # fmt: skip


MAX_ROWS = 65536
"""An inbox has words for so many rows."""
_inboxes: dict[torch.device, Tensor] = {}


def _inbox(device: torch.device) -> Tensor:
    """The device's words between programs. Launches share it, so they must run one after another. The first call must
    not be part of a CUDA graph, whose memory it would be."""
    if device not in _inboxes:
        _inboxes[device] = torch.full((MAX_ROWS // 64, 3, 3, 64), -1, dtype=torch.int64, device=device)
    return _inboxes[device]


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel supports this product, and is faster than a product and a norm."""
    return len(weight) == INPUTS and len(x) <= MAX_ROWS and not under_mps() and resident_hopper.serves(x, weight)


def linear_add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Norm,
    out: Tensor | None = None,
) -> Tensor:
    """norm(residual + x @ weight.T + bias): x and residual [M, 384], weight [384, 384] -> [M, 384], contiguous. out may
    be the residual; M is at most MAX_ROWS. The sum is not rounded before it is normalized."""
    assert norm.kind is NormKind.LAYER, norm.kind
    assert len(x) <= MAX_ROWS, len(x)
    if out is None:
        out = torch.empty_like(residual)
    tiles = triton.cdiv(len(x), 64)
    if tiles:
        lanes = min(processors(x.device) // 3, tiles)
        assert lanes, "a lane's three programs wait for each other, and each takes a multiprocessor"
        resident_norm_hopper_kernel[(3 * lanes,)](
            x=descriptor(x, 64, 64), w=descriptor(weight, SLICE, 64), bias=bias, residual=descriptor(residual, 64, 128),
            scale=norm.weight, shift=norm.bias, out=descriptor(out, 64, 128),
            inbox=_inbox(x.device), tiles=tiles, eps=norm.eps, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out
