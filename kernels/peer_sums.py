"""Sums and gathered columns of tensor ranks over peer memory, each in one kernel. Knows words and ranks, no model.

Each rank writes its numbers into all other ranks' memory and adds what arrives in its own. All ranks make the same
exchanges in the same order, and count them. A short exchange goes through inboxes, a long one through parcels:

    inbox     int64 [2, R, capacity]. A word is eight bytes that are written at once: four bytes of numbers and the
              exchange's count. Who reads the word sees whether it has arrived: no fence and no further message is
              needed (the idea of NCCL's protocol LL).
    parcels   int32 [2, R, capacity] numbers alone, then int32 [2, R, programs]: the count of the exchange whose numbers
              a program has written. Half the bytes, and one place to look at for each program.

Both have halves for odd and even exchanges, with a part for each sender. Two halves suffice: a rank that begins
exchange n + 2 has all numbers of exchange n + 1, which others send after they have read exchange n. A sum is added up
in the order of the ranks, in float32, so it has the same bits on all ranks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait

WORD = 4
"""Bytes of numbers in a word."""
SHORT_WORDS = 1 << 17
"""Most words of an exchange through inboxes."""
SHORT = tl.constexpr(SHORT_WORDS)
_FEW_WORDS, _LONG_BLOCK = 1 << 15, 4096


def inbox_bytes(ranks: int) -> int:
    """Bytes of an inbox."""
    return 2 * ranks * SHORT_WORDS * 8


def parcel_bytes(ranks: int, capacity: int) -> int:
    """Bytes of parcels for exchanges of `capacity` words."""
    return 2 * ranks * (capacity - (-capacity // _LONG_BLOCK)) * WORD


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank's way to the others."""

    rank: int
    inboxes: Tensor
    """int64 [R]: the address of each rank's inbox, as this rank reaches it."""
    parcels: Tensor
    """int64 [R]: that of its parcels."""
    capacity: int
    """Words that one exchange may have."""
    state: Tensor
    """int32 [2]: exchanges so far, and programs of this one that have ended; zeros at first."""


@triton.jit
def _memory(addresses, rank, kind: tl.constexpr):
    """A rank's memory."""
    return tl.load(addresses + rank).to(tl.pointer_type(kind))


@triton.jit
def _send(
    peers, numbers, at, mask, exchange, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write this rank's numbers into all other ranks' memory."""
    part = (exchange & 1) * RANKS + RANK
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            if LONG:
                tl.store(_memory(peers, rank, tl.int32) + part * capacity + at, numbers, mask=mask)
            else:
                word = (numbers.to(tl.int64) & 0xFFFFFFFF) | (exchange << 32)
                tl.store(_memory(peers, rank, tl.int64) + part * SHORT + at, word, mask=mask)
    if LONG:
        tl.debug_barrier()  # All of the program's numbers precede the counts.
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                count = _count_at(_memory(peers, rank, tl.int32), part, capacity, RANKS, BLOCK)
                tl.atomic_xchg(count, exchange.to(tl.int32), sem="release", scope="sys")


@triton.jit
def _count_at(parcels, part, capacity, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the count of a part is, of this program's number."""
    return parcels + 2 * RANKS * capacity + part * tl.cdiv(capacity, BLOCK) + tl.program_id(0)


@triton.jit
def _received(
    peers, rank, at, mask, exchange, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of another rank, once they have arrived."""
    part = (exchange & 1) * RANKS + rank
    if LONG:
        parcels = _memory(peers, RANK, tl.int32)
        count = _count_at(parcels, part, capacity, RANKS, BLOCK)
        seen = tl.atomic_add(count, 0, sem="acquire", scope="sys")
        while seen != exchange.to(tl.int32):
            seen = tl.atomic_add(count, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        numbers = tl.load(parcels + part * capacity + at, mask=mask, other=0, cache_modifier=".cg")
    else:
        places = _memory(peers, RANK, tl.int64) + part * SHORT + at
        word = tl.load(places, mask=mask, other=0, volatile=True)
        while tl.max(tl.where(mask & ((word >> 32) != exchange), 1, 0), 0) > 0:
            word = tl.load(places, mask=mask, other=0, volatile=True)
        numbers = word.to(tl.int32)
    return numbers


@triton.jit
def _finish(state, exchange):
    """The last program to end counts the exchange."""
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, exchange.to(tl.int32))


@triton.jit
def _low(words, NUMBER: tl.constexpr):
    """The first number of each word, in float32."""
    if NUMBER.primitive_bitwidth == 32:
        number = words.to(tl.float32, bitcast=True)
    else:
        number = (words & 0xFFFF).to(tl.int16).to(NUMBER, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _high(words, NUMBER: tl.constexpr):
    """The second number of each word, in float32; of no meaning if a word has one."""
    if NUMBER.primitive_bitwidth == 32:
        number = words.to(tl.float32, bitcast=True)
    else:
        number = (words >> 16).to(tl.int16).to(NUMBER, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _packed(low, high, NUMBER: tl.constexpr):
    """Words of these numbers."""
    if NUMBER.primitive_bitwidth == 32:
        words = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(NUMBER).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = first | (high.to(NUMBER).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit(do_not_specialize=["count"])
def sum_kernel(
    part, residual, bias, out,  # int32: words of [T, n], [T, n] or None, [n] or None, [T, n]
    peers, state,  # int64 [R]: of inboxes or parcels; int32 [2]
    count, row_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, NUMBER: tl.constexpr,
    LONG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = residual + the sum of all ranks' parts + bias."""
    wait(PDL)
    exchange = tl.load(state, volatile=True).to(tl.int64) + 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    own = tl.load(part + at, mask=mask, other=0)
    _send(peers, own, at, mask, exchange, capacity, RANK, RANKS, LONG, BLOCK)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        words = own
        if rank != RANK:
            words = _received(peers, rank, at, mask, exchange, capacity, RANK, RANKS, LONG, BLOCK)
        low += _low(words, NUMBER)
        high += _high(words, NUMBER)
    if bias is not None:
        words = tl.load(bias + at % row_words, mask=mask, other=0)
        low += _low(words, NUMBER)
        high += _high(words, NUMBER)
    if residual is not None:
        words = tl.load(residual + at, mask=mask, other=0)
        low += _low(words, NUMBER)
        high += _high(words, NUMBER)
    tl.store(out + at, _packed(low, high, NUMBER), mask=mask)
    _finish(state, exchange)


@triton.jit(do_not_specialize=["count"])
def gather_kernel(
    own_columns, out,  # int32: words of [T, n], [T, R * n]
    peers, state,  # int64 [R]: of inboxes or parcels; int32 [2]
    count, row_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = all ranks' columns side by side."""
    wait(PDL)
    exchange = tl.load(state, volatile=True).to(tl.int64) + 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    own = tl.load(own_columns + at, mask=mask, other=0)
    _send(peers, own, at, mask, exchange, capacity, RANK, RANKS, LONG, BLOCK)
    line = out + (at // row_words).to(tl.int64) * (RANKS * row_words) + at % row_words
    for rank in tl.static_range(RANKS):
        words = own
        if rank != RANK:
            words = _received(peers, rank, at, mask, exchange, capacity, RANK, RANKS, LONG, BLOCK)
        tl.store(line + rank * row_words, words, mask=mask)
    _finish(state, exchange)


_NUMBERS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def serves(x: Tensor) -> bool:
    """Whether x [T, n] can be exchanged: its rows are whole words."""
    return x.dtype in _NUMBERS and x.shape[-1] * x.element_size() % WORD == 0


def row_words(x: Tensor) -> int:
    """Words that an exchange of a row of x [T, n] has."""
    return x.shape[-1] * x.element_size() // WORD


def words_of(x: Tensor) -> int:
    """Words that an exchange of x has."""
    return x.numel() * x.element_size() // WORD


def add_sum(
    part: Tensor, peers: Peers, out: Tensor, residual: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """out = residual + the sum of all ranks' parts + bias. part, residual, out [T, n], bias [n], of one dtype and
    contiguous; out may be residual or part."""
    words, count = _words(part), words_of(part)
    assert count <= peers.capacity, count
    if not count:
        return
    block, warps, long = _block(count)
    sum_kernel[(triton.cdiv(count, block),)](
        words, None if residual is None else _words(residual), None if bias is None else _words(bias), _words(out),
        peers.parcels if long else peers.inboxes, peers.state, count, words.shape[-1], peers.capacity,
        RANK=peers.rank, RANKS=len(peers.inboxes), NUMBER=_NUMBERS[part.dtype], LONG=long, BLOCK=block, num_warps=warps,
        **launch_options(part.device),
    )  # fmt: skip


def gather_columns(columns: Tensor, peers: Peers) -> Tensor:
    """All ranks' columns [T, n] side by side: [T, R * n], contiguous."""
    words, ranks = _words(columns), len(peers.inboxes)
    out = columns.new_empty(len(columns), ranks * columns.shape[1])
    count = words.numel()
    assert count <= peers.capacity, count
    if not count:
        return out
    block, warps, long = _block(count)
    gather_kernel[(triton.cdiv(count, block),)](
        words, _words(out), peers.parcels if long else peers.inboxes, peers.state, count, words.shape[1],
        peers.capacity, RANK=peers.rank, RANKS=ranks, LONG=long, BLOCK=block, num_warps=warps,
        **launch_options(columns.device),
    )  # fmt: skip
    return out


def _words(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.view(torch.int32)


def _block(count: int) -> tuple[int, int, bool]:
    """Words and warps of a program, and whether it sends parcels. A warp alone waits without a barrier; more words take
    fewer programs."""
    if count > SHORT_WORDS:
        return _LONG_BLOCK, 8, True
    return (128, 1, False) if count <= _FEW_WORDS else (1024, 4, False)
