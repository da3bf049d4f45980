"""What all split-K kernels for few rows share: the shape of a program, and the epilogue of its kernel (the sum over
splits of K, the gate, bias and residual, the store).

M rows of x, N outputs. A product is held in registers as [BLOCK_N, BLOCK_M], one column for each row of x.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import shared_bytes


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the programs of a split-K kernel."""

    n: int
    k: int
    split: int = 1
    stages: int = 4
    warps: int = 4
    ahead: int = 4
    """Lines of 128 bytes per row of W that a program prefetches before the previous kernel has ended."""

    def stages_on(self, device: torch.device) -> int:
        """Pipeline stages: as chosen on a Hopper, at most 2 on GPUs with less than 110 KiB of shared memory a
        program."""
        return self.stages if shared_bytes(device) >= 110 << 10 else min(self.stages, 2)


@triton.jit
def join(
    product, up,  # float32 [BLOCK_N, BLOCK_M]; up is used with TWO
    parts,  # float32 [2 or 1, SPLIT, size]
    arrived,  # int32, zero between launches
    counter,  # which of `arrived` counts the splits of this product
    split,
    target, valid, size,  # offsets of the product in a split's part
    SPLIT: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """-> whether this program is the last of its splits to arrive, and in that case the sums over all splits."""
    last = SPLIT == 1
    if SPLIT > 1:
        # Every split stores its part; the last to arrive adds all of them, always in the same order.
        tl.store(parts + split * size + target, product, mask=valid)
        if TWO:
            tl.store(parts + (SPLIT + split) * size + target, up, mask=valid)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + counter, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrived + counter, 0)
            product = tl.zeros_like(product)
            up = tl.zeros_like(up)
            for other in tl.static_range(SPLIT):
                product += tl.load(parts + other * size + target, mask=valid, other=0.0, cache_modifier=".cg")
                if TWO:
                    up += tl.load(parts + (SPLIT + other) * size + target, mask=valid, other=0.0, cache_modifier=".cg")
    return last, product, up


@triton.jit
def finish(
    product, up,  # float32 [BLOCK_N, BLOCK_M]; up is used with GATED
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    parts, arrived, counter, split,  # as `join` takes them
    columns, rows, M, N,
    SPLIT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out[rows, columns] = the sum of all splits' products (GATED: silu(product) * up) + bias + residual."""
    here = columns < N
    target = rows[None, :] * N + columns[:, None]
    valid = here[:, None] & (rows < M)[None, :]
    # Bias and residual are loaded while the splits are summed.
    if bias is not None:
        shift = tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + target, mask=valid, other=0.0).to(tl.float32)
    last, product, up = join(product, up, parts, arrived, counter, split, target, valid, M * N, SPLIT, GATED)
    if last:
        if GATED:
            product = product * tl.sigmoid(product) * up
        if bias is not None:
            product += shift[:, None]
        if residual is not None:
            product += before
        tl.store(out + target, product.to(out.dtype.element_ty), mask=valid)


class Workspace:
    """Buffers for partial sums, one set per stream of launches: zeroed counters, and parts for the widest product."""

    def __init__(self, device: torch.device, words: int = 9 << 20, tiles: int = 16384) -> None:
        self.parts = torch.empty(words, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


_workspaces: dict[torch.device, Workspace] = {}


def workspace(device: torch.device, words: int) -> Workspace:
    """The device's workspace, which must hold at least `words` partial sums."""
    if device not in _workspaces:
        _workspaces[device] = Workspace(device)
    space = _workspaces[device]
    assert words <= space.parts.numel(), words
    return space
