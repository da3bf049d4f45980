"""Sums and gathered columns of tensor ranks over peer memory, each in one kernel. Knows words and ranks, no model.

Each rank writes its numbers into all other ranks' memory and adds what arrives in its own (`kernels.peers.words`). A
sum is added up in the order of the ranks, in float32, so it has the same bits on all ranks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.operands import Norm, NormKind
from kernels.peers.words import (
    LONG_BLOCK,
    SHORT,
    SHORT_WORDS,
    WORD,
    Peers,
    await_count,
    end_exchange,
    memory,
    next_exchange,
    post_count,
    put_words,
    take_words,
)

_FEW_WORDS = 1 << 15


@triton.jit
def _count_at(parcels, part, capacity, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """The place of this program's count in a part of parcels."""
    return parcels + 2 * RANKS * capacity + part * tl.cdiv(capacity, BLOCK) + tl.program_id(0)


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
                tl.store(memory(peers, rank, tl.int32) + part * capacity + at, numbers, mask=mask)
            else:
                put_words(memory(peers, rank, tl.int64) + part * SHORT, numbers, at, mask, exchange)
    if LONG:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                post_count(_count_at(memory(peers, rank, tl.int32), part, capacity, RANKS, BLOCK), exchange)


@triton.jit
def _received(
    peers, rank, at, mask, exchange, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of another rank, once they have arrived."""
    part = (exchange & 1) * RANKS + rank
    if LONG:
        parcels = memory(peers, RANK, tl.int32)
        await_count(_count_at(parcels, part, capacity, RANKS, BLOCK), exchange)
        numbers = tl.load(parcels + part * capacity + at, mask=mask, other=0, cache_modifier=".cg")
    else:
        numbers = take_words(memory(peers, RANK, tl.int64) + part * SHORT, at, mask, exchange)
    return numbers


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


@triton.jit
def _own_words(part, at, mask, size, SPLIT: tl.constexpr, NUMBER: tl.constexpr):
    """The words at these places of a rank's part: of words, or of SPLIT float32 parts of `size` numbers each, which are
    added up."""
    if SPLIT:
        both = 2 * at[:, None] + tl.arange(0, 2)[None, :]
        total = tl.zeros([at.shape[0], 2], tl.float32)
        for split in tl.static_range(SPLIT):
            total += tl.load(part + split * size + both, mask=mask[:, None], other=0.0)
        low, high = tl.split(total)
        words = _packed(low, high, NUMBER)
    else:
        words = tl.load(part + at, mask=mask, other=0)
    return words


@triton.jit(do_not_specialize=["count"])
def sum_of_ranks_kernel(
    part,  # int32: words of [T, n]; SPLIT > 0: float32 [SPLIT, T, n], which are added up first
    residual, bias, out,  # int32: words of [T, n] or None, [n] or None, [T, n]
    peers, state,  # int64 [R]: of inboxes or parcels; int32 [2]
    count, row_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, NUMBER: tl.constexpr, SPLIT: tl.constexpr,
    LONG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = residual + the sum of all ranks' parts + bias."""
    wait(PDL)
    exchange = next_exchange(state)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    own = _own_words(part, at, mask, 2 * count, SPLIT, NUMBER)
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
    end_exchange(state, exchange)


@triton.jit(do_not_specialize=["count"])
def columns_of_ranks_kernel(
    own_columns, out,  # int32: words of [T, n], [T, R * n]
    peers, state,  # int64 [R]: of inboxes or parcels; int32 [2]
    count, row_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = all ranks' columns side by side."""
    wait(PDL)
    exchange = next_exchange(state)
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
    end_exchange(state, exchange)


@triton.jit(do_not_specialize=["first", "tokens"])
def rows_of_ranks_kernel(
    token_ids,  # int64 [T]
    table, out,  # int32: words of [tokens, n], [T, n]
    peers, state,  # int64 [R]: of inboxes; int32 [2]
    first, tokens, row_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = the rows of all ranks' tables for these tokens; this rank has `tokens` of them from `first` on."""
    wait(PDL)
    exchange = next_exchange(state)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < row_words
    own_row = tl.load(token_ids + tl.program_id(0)) - first
    here = (own_row >= 0) & (own_row < tokens)
    at = tl.program_id(0) * row_words + columns
    words = tl.load(table + own_row * row_words + columns, mask=mask & here, other=0)
    _send(peers, words, at, mask, exchange, capacity, RANK, RANKS, False, BLOCK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            words |= _received(peers, rank, at, mask, exchange, capacity, RANK, RANKS, False, BLOCK)
    tl.store(out + at, words, mask=mask)
    end_exchange(state, exchange)


@triton.jit
def sum_and_norm_of_ranks_kernel(
    part,  # int32: words of [T, n]; SPLIT > 0: float32 [SPLIT, T, n], which are added up first
    residual, bias, weight, out,  # int32: words of [T, n] in and out, [n] or None, [n], [T, n]
    peers, state,  # int64 [R]: of inboxes; int32 [2]
    row_words, capacity, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, NUMBER: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """residual += the sum of all ranks' parts + bias; out = the RMS norm of residual. A program has a row."""
    columns = tl.arange(0, BLOCK)
    mask = columns < row_words
    scale = tl.load(weight + columns, mask=mask, other=0)
    wait(PDL)
    exchange = next_exchange(state)
    at = tl.program_id(0) * row_words + columns
    own = _own_words(part, at, mask, 2 * tl.num_programs(0) * row_words, SPLIT, NUMBER)
    _send(peers, own, at, mask, exchange, capacity, RANK, RANKS, False, BLOCK)
    before = tl.load(residual + at, mask=mask, other=0)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        words = own
        if rank != RANK:
            words = _received(peers, rank, at, mask, exchange, capacity, RANK, RANKS, False, BLOCK)
        low += _low(words, NUMBER)
        high += _high(words, NUMBER)
    if bias is not None:
        words = tl.load(bias + columns, mask=mask, other=0)
        low += _low(words, NUMBER)
        high += _high(words, NUMBER)
    words = _packed(low + _low(before, NUMBER), high + _high(before, NUMBER), NUMBER)
    tl.store(residual + at, words, mask=mask)
    low = _low(words, NUMBER)
    squares = low * low
    numbers = row_words
    if NUMBER.primitive_bitwidth == 16:
        high = _high(words, NUMBER)
        squares += high * high
        numbers = 2 * row_words
    inverse = 1.0 / tl.sqrt_rn(tl.sum(squares) / numbers + eps)
    normed = _packed(low * inverse * _low(scale, NUMBER), high * inverse * _high(scale, NUMBER), NUMBER)
    tl.store(out + at, normed, mask=mask)
    end_exchange(state, exchange)


_NUMBERS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def serves(x: Tensor) -> bool:
    """Whether x [T, n] can be exchanged: its rows are whole words."""
    return x.dtype in _NUMBERS and x.shape[-1] * x.element_size() % WORD == 0


def row_words(x: Tensor) -> int:
    """Words that an exchange of a row of x [T, n] has."""
    return x.shape[-1] * x.element_size() // WORD


def add_sum(
    part: Tensor, peers: Peers, out: Tensor, residual: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """out = residual + the sum of all ranks' parts + bias. part, residual, out [T, n], bias [n], of one dtype and
    contiguous; out may be residual or part. Where the others have 16 bits, part may be float32 [S, T, n]: its sum over
    S, rounded, is the rank's part."""
    split, words = (len(part) if part.dim() == 3 else 0), row_words(out)
    count = len(out) * words
    assert count <= peers.capacity, count
    if not count:
        return
    block, warps, long = _block(count)
    sum_of_ranks_kernel[(triton.cdiv(count, block),)](
        part if split else _words(part), None if residual is None else _words(residual),
        None if bias is None else _words(bias), _words(out), peers.parcels if long else peers.inboxes, peers.state,
        count, words, peers.capacity, RANK=peers.rank, RANKS=len(peers.inboxes), NUMBER=_NUMBERS[out.dtype],
        SPLIT=split, LONG=long, BLOCK=block, num_warps=warps, **launch_options(part.device),
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
    columns_of_ranks_kernel[(triton.cdiv(count, block),)](
        words, _words(out), peers.parcels if long else peers.inboxes, peers.state, count, words.shape[1],
        peers.capacity, RANK=peers.rank, RANKS=ranks, LONG=long, BLOCK=block, num_warps=warps,
        **launch_options(columns.device),
    )  # fmt: skip
    return out


def take_rows(token_ids: Tensor, table: Tensor, first: int, peers: Peers) -> Tensor:
    """The rows [T, n] for token_ids, int64 [T], of a table that ranks share: `table` [tokens, n] is this rank's part,
    from row `first` on. At most SHORT_WORDS words."""
    rows, words = len(token_ids), row_words(table)
    assert 0 < rows * words <= SHORT_WORDS, (rows, words)
    out = table.new_empty(rows, table.shape[1])
    block = min(1024, triton.next_power_of_2(words))
    rows_of_ranks_kernel[(rows, triton.cdiv(words, block))](
        token_ids, _words(table), _words(out), peers.inboxes, peers.state, first, len(table), words, peers.capacity,
        RANK=peers.rank, RANKS=len(peers.inboxes), BLOCK=block, num_warps=max(1, block // 256),
        **launch_options(table.device),
    )  # fmt: skip
    return out


def add_sum_and_normalize(
    part: Tensor, peers: Peers, residual: Tensor, norm: Norm, bias: Tensor | None = None
) -> Tensor:
    """residual += the sum of all ranks' parts + bias -> the norm of residual. All as in `add_sum`, of at most
    SHORT_WORDS words; the norm is one that `normalizes`."""
    rows, words = len(residual), row_words(residual)
    split = len(part) if part.dim() == 3 else 0
    assert 0 < rows * words <= SHORT_WORDS, (rows, words)
    assert normalizes(residual, norm)
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(words)
    sum_and_norm_of_ranks_kernel[(rows,)](
        part if split else _words(part), _words(residual), None if bias is None else _words(bias), _words(norm.weight),
        _words(out), peers.inboxes, peers.state, words, peers.capacity, norm.eps, RANK=peers.rank,
        RANKS=len(peers.inboxes), NUMBER=_NUMBERS[residual.dtype], SPLIT=split, BLOCK=block,
        num_warps=min(16, max(1, block // 256)), **launch_options(part.device),
    )  # fmt: skip
    return out


def normalizes(x: Tensor, norm: Norm) -> bool:
    """Whether `add_sum_and_normalize` knows this norm: RMS, with weights of the dtype of x."""
    return norm.kind is NormKind.RMS and norm.weight.dtype == x.dtype


def _words(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.view(torch.int32)


def _block(count: int) -> tuple[int, int, bool]:
    """Words and warps of a program, and whether it sends parcels. A warp alone waits without a barrier; more words take
    fewer programs."""
    if count > SHORT_WORDS:
        return LONG_BLOCK, 8, True
    return (128, 1, False) if count <= _FEW_WORDS else (1024, 4, False)
