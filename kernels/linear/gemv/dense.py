"""Chooses program shapes for, and launches, the Hopper kernel for one row of x and 16-bit weights.

N outputs, K inputs; the kernel is in `kernels.linear.gemv.kernel`. It also takes a few rows, for which
`kernels.linear.dense_hopper` is as fast or faster.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.device import processors
from kernels.linear.gemv.kernel import gemv_kernel
from kernels.linear.gemv.packed import MULTIPROCESSORS, WARPS, Shape, block_of
from kernels.linear.gluon_common import NO_EXPERTS, NO_POOL, descriptor, pool_arguments

PANEL = 64
"""Inputs of a chunk: 128 bytes of a row."""
HELD_CHUNKS, REGISTERS = 96, 96
"""Chunks that a program holds which has a multiprocessor alone, 192 KiB, and registers per thread at its launch."""
MOST_INPUTS = {1: 16384, 2: 8192}
"""Programs per multiprocessor -> the most inputs of x that fit into shared memory beside the chunks."""
_SHARED_BYTES, _CHUNK_BYTES = 225 << 10, 16 * 128


def shape_for(n: int, k: int, gated: bool) -> Shape | None:
    """The shape for one row x [1, k] times W [n, k] (gated: [2n, k]), or None where another kernel is as fast. Measured
    on one H200."""
    outputs = 2 * n if gated else n
    chunks = _chunks(k, 2 * WARPS)
    if chunks is None or outputs % 16 or k > MOST_INPUTS[1] or k > 2 * n:
        return None
    if outputs // 16 <= MULTIPROCESSORS or k > MOST_INPUTS[2]:
        return Shape(chunks, max(2, min(HELD_CHUNKS, k // PANEL) // chunks), 1, REGISTERS)
    return Shape(chunks, HELD_CHUNKS // 2 // chunks)


def experts_shape_for(n: int, k: int, gated: bool, chosen: int) -> Shape | None:
    """The shape for a row of x and the weights of experts [E, n, k], or None where another kernel serves."""
    boxes = 1 if gated else chosen
    chunks = _chunks(k * boxes, max(2 * WARPS, 4 * boxes), boxes)
    if chunks is None or n % 16 or chosen not in (1, 2, 4, 8):
        return None
    stages = min(HELD_CHUNKS, (_SHARED_BYTES - 2 * k * boxes) // _CHUNK_BYTES) // chunks
    return Shape(chunks, stages, 1, REGISTERS) if stages >= 2 else None


def _chunks(inputs: int, most: int, boxes: int = 1) -> int | None:
    """The most chunks of a load, up to `most`, that divide the inputs and are boxes of whole chunks, or None."""
    found = (chunks for chunks in (4 * WARPS, 2 * WARPS, WARPS) if chunks <= most and chunks >= boxes)
    return next((chunks for chunks in found if inputs % (chunks * PANEL) == 0), None)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor, shape: Shape
) -> Tensor:
    """As `dense.linear`, without a bias where it is gated."""
    tiles = len(weight) // 16
    _launch(x, weight, len(weight), tiles, 1, bias, residual, gated, out, shape, NO_POOL, NO_EXPERTS)
    return out


def rotated_qkv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, positions_M: Tensor, kv_NP2GD: Tensor,
    slot_mapping_M: Tensor, heads: int, shape: Shape,
) -> Tensor:  # fmt: skip
    """As `qkv_rope.rotated_qkv`, for head dimensions of 64 and 128."""
    out = torch.empty(len(x), heads, kv_NP2GD.shape[4], dtype=x.dtype, device=x.device)
    pool = pool_arguments(cos, sin, positions_M, kv_NP2GD, slot_mapping_M, heads)
    _launch(x, weight, len(weight), len(weight) // 16, 1, bias, None, False, out, shape, pool, NO_EXPERTS)
    return out


def experts_up(x: Tensor, weights: Tensor, logits: Tensor, chosen: int, normalized: bool, shape: Shape) -> Tensor:
    """silu(gate) * up * weight of one row x [1, K] by the likeliest experts of weights [E, 2N, K] -> [1, chosen * N],
    the likeliest expert's results first. logits [1, E]; normalized: the weights of the chosen experts sum to 1."""
    count, n, k = weights.shape
    out = torch.empty(1, chosen * n // 2, dtype=x.dtype, device=x.device)
    listed = {"logits": logits, "each": n // 16, "EXPERTS": count, "CHOSEN": chosen, "NORMALIZED": normalized}
    _launch(x, weights.view(-1, k), n, n // 16 * chosen, 1, None, None, True, out, shape, NO_POOL, listed)
    return out


def experts_down(residual: Tensor, x: Tensor, weights: Tensor, logits: Tensor, chosen: int, shape: Shape) -> None:
    """residual [1, N] += the sum of x [1, chosen * K], the result of `experts_up`, by the likeliest experts of weights
    [E, N, K]. The kernel before is that of `experts_up`."""
    count, n, k = weights.shape
    listed = {"logits": logits, "each": n // 16, "EXPERTS": count, "CHOSEN": chosen, "NORMALIZED": True}
    _launch(x, weights.view(-1, k), n, n // 16, chosen, None, residual, False, residual, shape, NO_POOL, listed)


def _launch(
    x: Tensor, weight: Tensor, n: int, tiles: int, boxes: int, bias: Tensor | None, residual: Tensor | None,
    gated: bool, out: Tensor, shape: Shape, pool: dict[str, Any], listed: dict[str, Any],
) -> None:  # fmt: skip
    """n: outputs of the weight, or of an expert; boxes: experts whose products are one sum."""
    rows, chunks, box = len(x), weight.shape[1] // PANEL, shape.chunks // boxes
    gemv_kernel[(min(tiles, processors(x.device) * shape.per_sm),)](
        x=descriptor(x.view(rows, -1, PANEL).transpose(0, 1), box, block_of(rows), PANEL),
        packed=descriptor(weight.view(-1, chunks, PANEL).transpose(0, 1), box, 8, PANEL), scales=None, zeros=None,
        bias=bias, residual=residual, out=out, M=rows, N=n // 2 if gated else n, C=chunks, groups=1, tiles=tiles,
        KIND="plain", GROUP=0, GATED=gated, HEAD=0 if pool["kv"] is None else pool["kv"].shape[-1], WARPS=shape.warps,
        STEPS=chunks // box, BOXES=boxes, STAGES=shape.stages, num_warps=shape.warps, maxnreg=shape.max_registers,
        launch_pdl=True, **pool, **listed,
    )  # fmt: skip
