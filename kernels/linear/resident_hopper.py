"""x W^T + bias, with GELU or without, of many rows and 384 inputs on a Hopper, in Gluon.

With so few inputs a program keeps the weights of 128 outputs in shared memory and reads rows only. Two warpgroups take
turns: while one applies bias and activation to its 64 rows and stores them, the other one multiplies.

    M rows of x    N outputs    a slice: 128 outputs    a part: half of the inputs of 64 rows
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

from kernels.device import is_hopper, processors
from kernels.linear.gluon_common import descriptor

INPUTS, SLICE = 384, 128
"""The inputs, and the outputs of a program."""
MIN_ROWS = 4096
"""For fewer rows it was not measured beside cuBLAS."""
_PANEL = gl.constexpr(64 * 64 * 2)
"""Bytes of 64 inputs of 64 rows."""


@gluon.jit
def produce(x, w, rows, weights, full, empty, w_full, tiles, slices):
    """Producer: the weights once, then the rows of the program's tiles, in turn for the two warpgroups."""
    first = gl.program_id(0) % slices * 128
    mbarrier.expect(w_full, 12 * _PANEL)
    for panel in gl.static_range(6):
        tma.async_copy_global_to_shared(w, [first, panel * 64], w_full, weights.index(panel))
    gdc_wait()
    turn = 0
    for tile in range(gl.program_id(0) // slices, tiles, gl.num_programs(0) // slices):
        for part in gl.static_range(2):
            place = turn % 2 * 2 + part
            mbarrier.wait(empty.index(place), (turn // 2 + 1) & 1)
            mbarrier.expect(full.index(place), 3 * _PANEL)
            for panel in gl.static_range(3):
                where = [tile * 64, (part * 3 + panel) * 64]
                tma.async_copy_global_to_shared(x, where, full.index(place), rows.index(place * 3 + panel))
        turn += 1  # noqa: SIM113 (kernels have no enumerate)


@gluon.jit
def _gelu(x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    argument = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [argument], dtype=gl.float32, is_pure=True, pack=1
    )
    half = 0.5 * x
    return half + half * tanh


@gluon.jit
def _consume(rows, weights, ready, full, empty, w_full, bias, out, tiles, slices, GELU: gl.constexpr,
             GROUP: gl.constexpr):  # fmt: skip
    """Consumer: a warpgroup computes every other tile of the program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    first, step = gl.program_id(0) % slices * 128, gl.num_programs(0) // slices
    added = gl.load(bias + first + gl.arange(0, 128, gl.SliceLayout(0, layout))).to(gl.float32)
    mbarrier.wait(w_full, 0)
    turn = 0
    for tile in range(gl.program_id(0) // slices + GROUP * step, tiles, 2 * step):
        product = gl.zeros([64, 128], gl.float32, layout)
        for part in gl.static_range(2):
            mbarrier.wait(full.index(GROUP * 2 + part), turn & 1)
            for panel in gl.static_range(3):
                a = rows.index((GROUP * 2 + part) * 3 + panel)
                b = weights.index(part * 3 + panel).permute([1, 0])
                product = warpgroup_mma(a, b, product, use_acc=part + panel > 0, is_async=True)
        product = warpgroup_mma_wait(3, [product])
        mbarrier.arrive(empty.index(GROUP * 2))
        product = warpgroup_mma_wait(0, [product])
        mbarrier.arrive(empty.index(GROUP * 2 + 1))
        product += added[None, :]
        if GELU:
            product = _gelu(product)
        tma.store_wait(0)
        gl.thread_barrier()
        ready.index(GROUP).store(product.to(ready.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [tile * 64, first], ready.index(GROUP))
        turn += 1  # noqa: SIM113 (kernels have no enumerate)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "slices"])
def resident_hopper_kernel(
    x,  # descriptor of [M, 384], boxes [64, 64]
    w,  # descriptor of [N, 384], boxes [128, 64]
    bias,  # [N]
    out,  # descriptor of [M, N], boxes [64, 128]
    tiles, slices, GELU: gl.constexpr,
):  # fmt: skip
    """Program p has slice p % slices and an equal share of the tiles of 64 rows."""
    rows = gl.allocate_shared_memory(x.dtype, [12, 64, 64], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [6, 128, 64], w.layout)
    ready = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(4):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
    mbarrier.init(w_full, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (rows, weights, ready, full, empty, w_full, bias, out, tiles, slices, GELU, 0)),
            (_consume, (rows, weights, ready, full, empty, w_full, bias, out, tiles, slices, GELU, 1)),
            (produce, (x, w, rows, weights, full, empty, w_full, tiles, slices)),
        ],
        [4, 1],
        [200, 24],
    )  # fmt: skip


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel supports this product, and is faster than cuBLAS: measured on one H100 and one H200."""
    fits = len(x) >= MIN_ROWS and x.shape[1] == INPUTS and len(weight) % SLICE == 0
    return fits and x.dtype == torch.bfloat16 and is_hopper(x.device)


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, or its GELU by the tanh approximation: x [M, 384], weight [N, 384] -> [M, N], contiguous."""
    if out is None:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    tiles, slices = triton.cdiv(len(x), 64), len(weight) // SLICE
    if tiles:
        lanes = max(1, min(processors(x.device) // slices, tiles))
        resident_hopper_kernel[(lanes * slices,)](
            x=descriptor(x, 64, 64), w=descriptor(weight, 128, 64), bias=bias, out=descriptor(out, 64, 128),
            tiles=tiles, slices=slices, GELU=gelu, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out
