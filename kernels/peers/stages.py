"""Activations from one stage of a pipeline to the next over peer memory. Knows words, no model.

The stage before writes into the next one's memory, which has two halves for odd and even transfers; a program's numbers
are complete when its count is that of the transfer. It waits until the transfer two before was taken: the next stage
writes the count of what it has taken into the memory of the stage before.

    parcels   int32 [2, capacity] numbers, then int32 [2, programs]: counts
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.peers.words import WORD, await_count, end_exchange, next_exchange, post_count

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class Link:
    """One end of the way from a stage to the next."""

    parcels: int
    """The address of the next stage's parcels, as this process reaches it."""
    taken: int
    """That of the count of transfers taken, int32, in the memory of the stage before."""
    capacity: int
    """Words of a half."""
    state: Tensor
    """int32 [2]: transfers so far, and programs of this one that have ended; zeros at first."""


def parcel_bytes(capacity: int) -> int:
    """Bytes of parcels for transfers of `capacity` words."""
    return 2 * (capacity - (-capacity // _BLOCK)) * WORD


@triton.jit
def _await_taken(taken, transfer):
    """Wait until the transfer two before was taken."""
    seen = tl.atomic_add(taken, 0, sem="acquire", scope="sys")
    while transfer.to(tl.int32) - seen > 2:
        seen = tl.atomic_add(taken, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "parcels", "taken"])
def send_to_stage_kernel(
    x,  # int32 [count]
    parcels, taken,  # addresses
    state, count, capacity, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write x into the next stage's parcels."""
    wait(PDL)
    transfer = next_exchange(state)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half, memory = transfer & 1, parcels.to(tl.pointer_type(tl.int32))
    numbers = tl.load(x + at, mask=at < count, other=0)
    _await_taken(taken.to(tl.pointer_type(tl.int32)), transfer)
    tl.store(memory + half * capacity + at, numbers, mask=at < count)
    post_count(memory + 2 * capacity + half * tl.cdiv(capacity, BLOCK) + tl.program_id(0), transfer)
    end_exchange(state, transfer)


@triton.jit(do_not_specialize=["count", "parcels", "taken"])
def receive_at_stage_kernel(
    x,  # int32 [count] out
    parcels, taken,  # addresses
    state, count, capacity, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Read x from this stage's parcels."""
    wait(PDL)
    transfer = next_exchange(state)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half, memory = transfer & 1, parcels.to(tl.pointer_type(tl.int32))
    await_count(memory + 2 * capacity + half * tl.cdiv(capacity, BLOCK) + tl.program_id(0), transfer)
    numbers = tl.load(memory + half * capacity + at, mask=at < count, other=0, cache_modifier=".cg")
    tl.store(x + at, numbers, mask=at < count)
    tl.debug_barrier()
    if end_exchange(state, transfer):
        post_count(taken.to(tl.pointer_type(tl.int32)), transfer)


def send(x: Tensor, link: Link) -> None:
    """Send x, contiguous, to the next stage."""
    _launch(send_to_stage_kernel, x, link)


def receive(x: Tensor, link: Link) -> None:
    """Fill x, contiguous, with what the stage before has sent."""
    _launch(receive_at_stage_kernel, x, link)


def _launch(kernel, x: Tensor, link: Link) -> None:
    words = x.view(-1).view(torch.int32)
    assert len(words) <= link.capacity, len(words)
    if len(words):
        kernel[(triton.cdiv(len(words), _BLOCK),)](
            words, link.parcels, link.taken, link.state, len(words), link.capacity, BLOCK=_BLOCK, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
