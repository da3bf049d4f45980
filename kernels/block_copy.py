"""Copies of whole KV blocks between the pages of all layers and one contiguous staging buffer, in one launch.

Knows pages as plain bytes, never keys or values. The staging buffer may be pinned host memory, which the kernel then
reads or writes over the bus.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 8


@triton.jit(do_not_specialize=["layers"])  # Compiled before a start with few layers, whatever it has.
def copy_blocks_kernel(
    pools,  # int64 [layers]: address of each layer's pool [N, words]
    staging,  # int64 [blocks, layers, words]
    blocks,  # int64 [blocks]
    words,
    layers,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < words
    pool = tl.load(pools + layer).to(tl.pointer_type(tl.int64))
    page = tl.multiple_of(pool + tl.load(blocks + index) * words, 2) + offsets
    place = staging + (index * layers + layer) * words + offsets
    if GATHER:
        tl.store(place, tl.load(page, mask=inside, other=0), mask=inside)
    else:
        tl.store(page, tl.load(place, mask=inside, other=0), mask=inside)


def pool_addresses(pools: Sequence[Tensor]) -> Tensor:
    """Addresses of the layers' pools, int64 [layers] on the pools' device; made once, used by every copy."""
    return torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=pools[0].device)


def _copy(addresses: Tensor, pool: Tensor, blocks: Tensor, staging: Tensor, gather: bool) -> None:
    words = pool[0].numel() * pool.element_size() // WORD_BYTES
    # Where some layers in a row are copied, the buffer has more of them.
    layers, rest = divmod(staging.stride(0) * staging.element_size(), words * WORD_BYTES)
    assert staging[:1].is_contiguous()
    assert not rest
    assert staging.numel() * staging.element_size() == len(blocks) * len(addresses) * words * WORD_BYTES
    block = min(2048, triton.next_power_of_2(words))
    if staging.numel():
        copy_blocks_kernel[(len(blocks), len(addresses), triton.cdiv(words, block))](
            addresses, staging.view(torch.int64), blocks, words, layers, GATHER=gather, BLOCK=block, num_warps=8
        )


def gather_blocks(addresses: Tensor, pool: Tensor, blocks: Tensor, staging: Tensor) -> None:
    """staging[i, layer] = pools[layer][blocks[i]].

    addresses: `pool_addresses` of all layers, or of some in a row; pool: any one of them, for its shape [N, P, 2, K, D]
    and dtype. blocks int64; staging [len(blocks), layers, P, 2, K, D], contiguous, or these layers of such a buffer. A
    page must be a multiple of 8 bytes.
    """
    _copy(addresses, pool, blocks, staging, True)


def scatter_blocks(addresses: Tensor, pool: Tensor, blocks: Tensor, staging: Tensor) -> None:
    """pools[layer][blocks[i]] = staging[i, layer]: the inverse of `gather_blocks`. No block twice."""
    _copy(addresses, pool, blocks, staging, False)
