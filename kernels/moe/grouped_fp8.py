"""Products of many experts in one launch, as `kernels.moe.grouped`, of rows rounded to fp8 and fp8 weights: at the rate
of fp8 tensor cores. Columns of rows and of weights are in the order of `kernels.linear.packed`.

    E experts    k experts that compute a token    entry t * k + i    N outputs    K inputs, padded to chunks of 128
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.device import shared_bytes
from kernels.linear import fp8
from kernels.linear.packed import CHUNK, PackedWeight
from kernels.moe.reference import Routes
from kernels.moe.tiles import Tile, expected_entries, gated, most_tiles, tile_of
from kernels.moe.weights import ExpertStack
from kernels.quantized_weights import FP8

MIN_ROWS = 24
"""The mean number of an expert's rows from which on they are rounded. Measured on one H200, as `TILES`."""
FEW, MANY = Tile(64, 256, CHUNK, 4, 8), Tile(128, 256, CHUNK, 4, 8)
TILES = ((96, FEW), (None, MANY))
"""By the mean number of an expert's rows, at most this. Outputs are those of the weight: gates and ups count alike."""
SMALL = ((64, Tile(64, 128, CHUNK, 4, 4)), (None, Tile(128, 128, CHUNK, 3, 8)))
"""On GPUs with less than 110 KiB of shared memory a program."""


@triton.jit
def fp8_grouped_kernel(
    x,  # fp8 [entries / DIVIDE, K]
    row_scales,  # float32 [entries / DIVIDE]
    weights,  # fp8 [E, N, K]; with GATE [E, 2N, K], the gates and then the ups
    scales,  # [E, scale_count]: of each output
    order,  # int32 [entries]
    offsets,  # int32 [E + 1]
    out,  # [entries, N]
    N, K, scale_count,
    E: tl.constexpr, BLOCK_E: tl.constexpr, DIVIDE: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of tiles and blocks of outputs: row e of the result is x[e // DIVIDE] @ W[expert of e].T, scaled. Of
    BLOCK_N outputs a gate and its up are neighbours, so that one thread has both."""
    wait(PDL)
    SHARE: tl.constexpr = 1 if GATE == "" else 2
    exists, block, expert, place, stop = tile_of(offsets, tl.cdiv(N, BLOCK_N // SHARE), E, BLOCK_E, BLOCK_M)
    if not exists:
        return
    expert = expert.to(tl.int64)
    places = place + tl.arange(0, BLOCK_M)
    entry = tl.load(order + places, mask=places < stop, other=0).to(tl.int64)  # Rows beyond the last are not stored.
    lanes = tl.arange(0, BLOCK_N)
    output = tl.minimum(block * (BLOCK_N // SHARE) + lanes // SHARE, N - 1)
    line = output + lanes % SHARE * N
    columns = tl.arange(0, BLOCK_K)
    inputs = x + (entry // DIVIDE)[:, None] * K + columns[None, :]
    lines = weights + (expert * (SHARE * N) + line)[:, None] * K + columns[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        total = tl.dot(tl.load(inputs + start), tl.trans(tl.load(lines + start)), total)
    total *= tl.load(row_scales + entry // DIVIDE)[:, None]
    total *= tl.load(scales + expert * scale_count + line).to(tl.float32)[None, :]
    if GATE != "":
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        total = gated(gate, up, GATE)
    outputs = block * (BLOCK_N // SHARE) + tl.arange(0, BLOCK_N // SHARE)
    target = out + entry[:, None] * N + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(places < stop)[:, None] & (outputs < N)[None, :])


def serves(x: Tensor, experts: ExpertStack, routes: Routes) -> bool:
    """Whether rows x are rounded to fp8 before their product with these experts."""
    many = len(x) > 0 and expected_entries(routes) >= MIN_ROWS * experts.count
    return many and isinstance(experts.weight, PackedWeight) and fp8.multiplies(experts.weight)


def tile_for(routes: Routes, device: torch.device) -> Tile:
    """The tile for the rows of these routes."""
    tiles = SMALL if shared_bytes(device) < 110 << 10 else TILES
    entries = expected_entries(routes)
    return next(tile for most, tile in tiles if most is None or entries <= most * routes.own)


def multiply(
    rounded: tuple[Tensor, Tensor],
    experts: ExpertStack,
    routes: Routes,
    dtype: torch.dtype,
    *,
    divide: int,
    gate: str = "",
    tile: Tile | None = None,
) -> Tensor:
    """As `grouped.multiply`, of rows from `fp8.round_rows`, fp8 [entries / divide, K] and float32 scales: [entries, N]
    of a 16-bit dtype. gate: silu or gelu of the first half of the outputs times the second, [entries, N / 2]. The tile
    is chosen unless given."""
    (values, row_scales), weight, entries = rounded, experts.weight, len(routes.order)
    assert isinstance(weight, PackedWeight)
    assert (weight.kind, weight.group) == ("fp8", 0)
    assert tuple(values.shape) == (entries // divide, weight.chunks * CHUNK), (values.shape, entries, divide)
    assert routes.own == experts.count, (routes.own, experts.count)
    outputs = experts.outputs // 2 if gate else experts.outputs
    out = torch.empty(entries, outputs, dtype=dtype, device=values.device)
    tile = tile or tile_for(routes, values.device)
    blocks = triton.cdiv(outputs, tile.outputs // 2 if gate else tile.outputs)
    if entries:
        fp8_grouped_kernel[(most_tiles(routes, tile) * blocks,)](
            values, row_scales, weight.packed.view(FP8), weight.scale, routes.order, routes.offsets, out, outputs,
            values.shape[1], weight.scale[0].numel(), E=experts.count, DIVIDE=divide, GATE=gate,
            BLOCK_E=max(16, triton.next_power_of_2(experts.count)), BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
            BLOCK_K=tile.inputs, STAGES=tile.stages, num_warps=tile.warps, **launch_options(values.device),
        )  # fmt: skip
    return out
