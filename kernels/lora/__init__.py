"""Adds low-rank adapters to a product: each token its own adapter, in two kernels. Knows slots, never adapters' names.

out[t] += B[slot of t] @ (A[slot of t] @ x[t]) for the tokens that have an adapter (Hu et al. 2021; grouped as by
Chen et al. 2023). `shrink` multiplies with A, `expand` with B.

    T tokens    K inputs    N outputs    R rank, padded    P parts: modules whose outputs follow one another
    S splits of K, whose sums are added in one order, so that a row's bits do not depend on the batch
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.lora.tiles import TILE, most_tiles

_BLOCK_K_BYTES, _BLOCK_N_BYTES = 128, 256
"""Inputs that a program of `shrink` reads at a time, and outputs of a program of `expand`."""
_SPLIT_INPUTS, _MOST_SPLITS, _MOST_PARTS = 1024, 8, 3
LEAST_RANK = 16
"""Ranks are padded with zeros to a power of two from this: the least that tensor cores multiply."""


@triton.jit(do_not_specialize=["T"])
def shrink_kernel(
    x,  # [T, K]
    a,  # [slots, P, R, K]
    hidden,  # float32 [S, T, P, R] out: by place in `order`
    order,  # int32 [T]
    tiles,  # int32 [W, 3]
    T, K, stride,  # stride of x's rows
    P: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies a tile's tokens with a split of A of one part."""
    wait(PDL)
    tile = tiles + 3 * tl.program_id(0)
    part, split = tl.program_id(1) // S, tl.program_id(1) % S
    slot, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        lines = tl.arange(0, TILE)
        token = tl.load(order + first + lines, mask=lines < count, other=0).to(tl.int64)
        lanes, ranks = tl.arange(0, BLOCK_K), tl.arange(0, R)
        weights = a + (slot * P + part) * R * K
        product = tl.zeros((TILE, R), tl.float32)
        share = tl.cdiv(tl.cdiv(K, S), BLOCK_K) * BLOCK_K
        for start in range(split * share, tl.minimum((split + 1) * share, K), BLOCK_K):
            columns = start + lanes
            inside = columns < K
            rows = tl.load(
                x + token[:, None] * stride + columns[None, :],
                mask=(lines < count)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            shrinking = tl.load(weights + ranks[:, None] * K + columns[None, :], mask=inside[None, :], other=0.0)
            product = tl.dot(rows, tl.trans(shrinking), product, input_precision="ieee" if IEEE else "tf32")
        place = ((split * T + first + lines) * P + part).to(tl.int64)
        tl.store(hidden + place[:, None] * R + ranks[None, :], product, mask=(lines < count)[:, None])


@triton.jit(do_not_specialize=["T"])
def expand_kernel(
    hidden,  # float32 [S, T, P, R]
    b,  # [slots, N, R]
    out,  # [T, N]: added to
    order,  # int32 [T]
    tiles,  # int32 [W, 3]
    T, N, stride,  # stride of out's rows
    end_0, end_1,  # where the first and the second part end; N for parts that there are not
    P: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies a tile's tokens with BLOCK_N lines of B, all of one part."""
    wait(PDL)
    tile = tiles + 3 * tl.program_id(0)
    slot, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        block = tl.program_id(1)
        blocks_0, blocks_1 = tl.cdiv(end_0, BLOCK_N), tl.cdiv(end_1 - end_0, BLOCK_N)
        second, third = block >= blocks_0, block >= blocks_0 + blocks_1
        part = second.to(tl.int32) + third.to(tl.int32)
        begin = tl.where(third, end_1, tl.where(second, end_0, 0))
        end = tl.where(third, N, tl.where(second, end_1, end_0))
        block -= tl.where(third, blocks_0 + blocks_1, tl.where(second, blocks_0, 0))
        lines, ranks = tl.arange(0, TILE), tl.arange(0, R)
        columns = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        here, valid = columns < end, lines < count
        token = tl.load(order + first + lines, mask=valid, other=0).to(tl.int64)
        target = out + token[:, None] * stride + columns[None, :]
        inside = valid[:, None] & here[None, :]
        before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        expanding = tl.load(b + (slot * N + columns[:, None]) * R + ranks[None, :], mask=here[:, None], other=0.0)
        sums = tl.zeros((TILE, R), tl.float32)
        for split in tl.static_range(S):
            place = ((split * T + first + lines) * P + part).to(tl.int64)
            sums += tl.load(hidden + place[:, None] * R + ranks[None, :], mask=valid[:, None], other=0.0)
        product = tl.dot(sums.to(b.dtype.element_ty), tl.trans(expanding), input_precision="ieee" if IEEE else "tf32")
        tl.store(target, (before + product).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The adapters of one product, by slot; slot 0 is not used."""

    a: Tensor
    """[slots + 1, P, R, K]."""
    b: Tensor
    """[slots + 1, N, R], times the adapters' scales."""
    ends: tuple[int, ...]
    """[P]: where each part's outputs end; the last one is N."""

    @classmethod
    def empty(cls, slots: int, rank: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> "AdapterStack":
        """Room for adapters that add nothing, of up to this rank. outputs: of each part."""
        ends = tuple(sum(outputs[: part + 1]) for part in range(len(outputs)))
        padded = padded_rank(rank)
        a = torch.zeros(slots + 1, len(outputs), padded, inputs, dtype=dtype)
        return cls(a, torch.zeros(slots + 1, ends[-1], padded, dtype=dtype), ends)


def padded_rank(rank: int) -> int:
    """R for adapters of up to this rank."""
    return max(LEAST_RANK, int(triton.next_power_of_2(rank)))


def add_adapters(out: Tensor, x: Tensor, stack: AdapterStack, order: Tensor, tiles: Tensor) -> None:
    """Add to out [T, N] what each token's adapter adds to the product with x [T, K], rows contiguous.

    order int32 [T] and tiles int32 [W, 3] as `kernels.lora.tiles` lays them out.
    """
    tokens, inputs = x.shape
    _, parts, rank, _ = stack.a.shape
    assert parts <= _MOST_PARTS, f"{parts} parts"
    splits = min(_MOST_SPLITS, triton.cdiv(inputs, _SPLIT_INPUTS))
    hidden = torch.empty(splits, tokens, parts, rank, dtype=torch.float32, device=x.device)
    shape = {"P": parts, "R": rank, "S": splits, "TILE": TILE, "IEEE": x.dtype == torch.float32}
    launch = {**shape, "num_warps": 4, **launch_options(x.device)}
    shrink_kernel[(len(tiles), parts * splits)](
        x,
        stack.a,
        hidden,
        order,
        tiles,
        tokens,
        inputs,
        x.stride(0),
        BLOCK_K=_BLOCK_K_BYTES // x.itemsize,
        **launch,
    )
    begins = (0, *stack.ends[:-1])
    block_n = _BLOCK_N_BYTES // x.itemsize
    blocks = sum(triton.cdiv(end - begin, block_n) for begin, end in zip(begins, stack.ends, strict=True))
    end_0, end_1 = (*stack.ends, stack.ends[-1])[:2]
    expand_kernel[(len(tiles), blocks)](
        hidden, stack.b, out, order, tiles, tokens, stack.ends[-1], out.stride(0), end_0, end_1, BLOCK_N=block_n,
        **launch,
    )  # fmt: skip


def reference(out: Tensor, x: Tensor, stack: AdapterStack, slots_T: Tensor) -> None:
    """The same in plain torch, a token at a time. slots_T [T]: the slot of each token's adapter; 0: none."""
    begins = (0, *stack.ends[:-1])
    for token, slot in enumerate(slots_T.tolist()):
        for part, (begin, end) in enumerate(zip(begins, stack.ends, strict=True)):
            if slot:
                hidden = stack.a[slot, part].float() @ x[token].float()
                added = stack.b[slot, begin:end].float() @ hidden.to(stack.b.dtype).float()
                out[token, begin:end] = (out[token, begin:end].float() + added).to(out.dtype)


__all__ = ["AdapterStack", "add_adapters", "most_tiles", "padded_rank", "reference"]
