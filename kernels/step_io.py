"""Inputs and outputs of a step on the device: unpacks packed words into the layers' inputs, stores sampled tokens in
their slots. Knows slots, positions and block tables, never sequences.

    T tokens of a step    R rows    S rows that sample    B blocks of a table    P tokens per block

A packed step is int32 words in three sections. The host may pad it to fixed T, R and S: with tokens after the last
row's, rows without tokens and context, and samples of row -1, which use the last slot (no sequence has it).

    tokens    T ids (-1: the last token of its row's slot; -2: in a step with guesses, the slot's own guess)
    rows      R + 1 starts, R contexts, R slots (-1: its tokens are not stored in the KV pool, and have position 0)
    samples   S rows that sample (-1: none; -2 - row: the row's logits are drawn from later, now for the last slot)

In a step with guesses a sample is its row + GUESS_PLACE times the number of tokens of the row after it. Where they are
checked, all tokens are sampled from, T = S. The own guesses of a slot, those of a draft model, are in a table on the
device: the words may be sent before the guesses are made.

Every list begins at a multiple of four words, so that all pointers have one alignment and one compiled kernel serves.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait

GUESS_PLACE = tl.constexpr(1 << 16)
"""More than the rows of any step."""


@triton.jit(do_not_specialize=["T", "R", "S", "row_blocks", "nobody"])
def unpack_kernel(
    words,  # int32, as above
    last_token, prompt_lens,  # int64 [slots]
    tables,  # int32 [slots, B]
    token_ids, positions, slot_mapping,  # int64 [T] out
    row_tables,  # int32 [R, row_blocks] out: the part in use
    sampled, sample_slots, sample_positions,  # int64 [S] out
    places,  # int32 [S] out, or None: guesses of its row before each sample
    own_guesses,  # int32 [slots, MOST] or None
    T, R, S, B, row_blocks, nobody,
    MOST: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0 to R - 1 copy one row's block table each, the others unpack BLOCK tokens or samples each."""
    wait(PDL)
    program = tl.program_id(0)
    starts = words + tl.cdiv(T, 4) * 4
    contexts = starts + tl.cdiv(R + 1, 4) * 4
    slots = contexts + tl.cdiv(R, 4) * 4
    if program < R:
        owner = tl.load(slots + program).to(tl.int64)
        count = tl.where(owner < 0, 0, tl.cdiv(tl.load(contexts + program), P))
        for start in range(0, count, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            table = tl.load(tables + owner * B + columns, mask=columns < count, other=0)
            tl.store(row_tables + program.to(tl.int64) * row_blocks + columns, table, mask=columns < count)
    else:
        here = (program - R) * BLOCK + tl.arange(0, BLOCK)
        row = tl.zeros([BLOCK], tl.int32)  # how many rows end before the token
        for first in range(0, R, ROWS):
            rows = first + tl.arange(0, ROWS)
            ends = tl.load(starts + 1 + rows, mask=rows < R, other=T)
            row += tl.sum((ends[None, :] <= here[:, None]).to(tl.int32), 1)
        inside = here < T
        known = here < tl.load(starts + R)
        id = tl.load(words + here, mask=known, other=0)
        slot = tl.load(slots + row, mask=known, other=-1).to(tl.int64)
        end = tl.load(starts + 1 + row, mask=known, other=0)
        placed = slot >= 0
        position = tl.where(placed, tl.load(contexts + row, mask=known, other=0) - end + here, 0)
        last = tl.load(last_token + slot, mask=placed & (id < 0), other=0)
        if own_guesses is not None:
            own = placed & (id == -2)
            guess = here - 1 - tl.load(starts + row, mask=own, other=0)
            last = tl.where(own, tl.load(own_guesses + slot * MOST + guess, mask=own, other=0).to(tl.int64), last)
        tl.store(token_ids + here, tl.where(id < 0, last, id.to(tl.int64)), mask=inside)
        tl.store(positions + here, position.to(tl.int64), mask=inside)
        block = tl.load(tables + slot * B + position // P, mask=placed, other=0).to(tl.int64)
        tl.store(slot_mapping + here, tl.where(placed, block * P + position % P, -1), mask=inside)
        some = here < S
        chosen = tl.load(slots + tl.cdiv(R, 4) * 4 + here, mask=some, other=-1)
        own = chosen >= 0  # not drawn later
        chosen = tl.where(chosen < -1, -2 - chosen, chosen)
        drawn = chosen >= 0
        after = tl.zeros_like(chosen)
        if places is not None:
            after = tl.where(drawn, chosen // GUESS_PLACE, 0)
            chosen = tl.where(drawn, chosen % GUESS_PLACE, -1)
        before = tl.load(starts + 1 + chosen, mask=drawn, other=1) - 1 - after
        tl.store(sampled + here, before.to(tl.int64), mask=some)
        if places is not None:
            begin = tl.load(starts + chosen, mask=drawn, other=0)
            tl.store(places + here, tl.where(drawn, before - begin, 0), mask=some)
        sampler = tl.load(slots + chosen, mask=own, other=nobody).to(tl.int64)
        tl.store(sample_slots + here, sampler, mask=some)
        context = tl.load(contexts + chosen, mask=drawn, other=0).to(tl.int64) - after
        prompt_len = tl.load(prompt_lens + sampler, mask=own, other=0)
        tl.store(sample_positions + here, context - prompt_len, mask=some)


@triton.jit(do_not_specialize=["S"])
def store_sampled_kernel(
    tokens,  # int64 [S]
    logprobs, totals,  # float32 [S]
    slots,  # int64 [S]
    last_token,  # int64 [slots] out
    report,  # int32 [3, S] out: tokens, bits of the log-probabilities, bits of the totals
    S,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store each slot's new last token, and the step's results for the host in one tensor."""
    wait(PDL)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = here < S
    token = tl.load(tokens + here, mask=known, other=0)
    tl.store(last_token + tl.load(slots + here, mask=known, other=0), token, mask=known)
    tl.store(report + here, token.to(tl.int32), mask=known)
    logprob = tl.load(logprobs + here, mask=known, other=0.0)
    tl.store(report + S + here, logprob.to(tl.int32, bitcast=True), mask=known)
    total = tl.load(totals + here, mask=known, other=0.0)
    tl.store(report + 2 * S + here, total.to(tl.int32, bitcast=True), mask=known)


@triton.jit
def finite_kernel(
    x,  # [T, n]
    finite,  # int32 [T] out: 1 if all numbers of the line are finite
    n,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    number = tl.load(x + line * n + columns, mask=columns < n, other=0.0).to(tl.float32)
    # x - x is not 0 for NaN and infinity only.
    odd = tl.sum((number - number != 0.0).to(tl.int32))
    tl.store(finite + line, (odd == 0).to(tl.int32))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors that `unpack` fills; sizes are those of the step, or of the CUDA graph that runs it."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    slot_mapping: Tensor
    """int64 [T]: block * P + offset in the KV pool; -1: not stored."""
    starts: Tensor
    """int32 [R + 1], a view of the words."""
    contexts: Tensor
    """int32 [R], a view of the words."""
    tables: Tensor
    """int32 [R, row blocks]."""
    sampled: Tensor
    """int64 [S]: the tokens that are sampled from: the last one of each row that samples, or guesses."""
    sample_slots: Tensor
    """int64 [S]."""
    sample_positions: Tensor
    """int64 [S]: position of the new token in its answer."""
    places: Tensor | None = None
    """int32 [S]: guesses of its row before each sample; None: a step without guesses."""


def words_of(tokens: int, rows: int, samples: int) -> int:
    """Number of words of a step."""
    return places_of(tokens, rows, samples)[-1]


def aligned(words: int) -> int:
    """The number of words rounded up to a multiple of four."""
    return -(-words // 4) * 4


@functools.cache
def places_of(tokens: int, rows: int, samples: int) -> list[int]:
    """Offset of each list in a step's words, in order, and the end of the last one."""
    counts = tokens, rows + 1, rows, rows, samples
    return [0, *itertools.accumulate(map(aligned, counts))]


def step_inputs(
    words: Tensor, tokens: int, rows: int, samples: int, tables: Tensor, guesses: bool = False
) -> StepInputs:
    """Allocate the inputs of a step of these sizes, whose words begin at `words`, with the first rows of `tables`.
    guesses: of a step with guesses."""
    device = words.device

    def room(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=device)

    starts, contexts = places_of(tokens, rows, samples)[1:3]
    return StepInputs(
        token_ids=room(tokens), positions=room(tokens), slot_mapping=room(tokens),
        starts=words[starts : starts + rows + 1], contexts=words[contexts : contexts + rows],
        tables=tables[:rows],
        sampled=room(samples), sample_slots=room(samples), sample_positions=room(samples),
        places=torch.empty(samples, dtype=torch.int32, device=device) if guesses else None,
    )  # fmt: skip


def unpack(
    words: Tensor, last_token: Tensor, prompt_lens: Tensor, tables: Tensor, into: StepInputs, block_size: int,
    own_guesses: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill a step's inputs from its words and the slots. last_token, prompt_lens int64 [slots], tables int32 [slots,
    B]; own_guesses int32 [slots, most of a slot], of a step with guesses."""
    tokens, rows, samples = len(into.token_ids), len(into.contexts), len(into.sampled)
    block = 128
    unpack_kernel[(rows + triton.cdiv(max(tokens, samples), block),)](
        words, last_token, prompt_lens, tables, into.token_ids, into.positions, into.slot_mapping, into.tables,
        into.sampled, into.sample_slots, into.sample_positions, into.places, own_guesses, tokens, rows, samples,
        tables.shape[1], into.tables.shape[1], len(tables) - 1,
        MOST=0 if own_guesses is None else own_guesses.shape[1], P=block_size, BLOCK=block, ROWS=64, num_warps=4,
        **launch_options(words.device),
    )  # fmt: skip


def store_sampled(
    tokens: Tensor, logprobs: Tensor, totals: Tensor, slots: Tensor, last_token: Tensor, report: Tensor
) -> None:
    """last_token[slots] = tokens, and report [3, S] int32 = tokens, log-probabilities and totals as bits."""
    samples = len(tokens)
    if samples:
        store_sampled_kernel[(triton.cdiv(samples, 256),)](
            tokens, logprobs, totals, slots, last_token, report, samples,
            BLOCK=256, num_warps=4, **launch_options(tokens.device),
        )  # fmt: skip


def finite_lines(x: Tensor, finite: Tensor) -> None:
    """finite[t] = 1 if all numbers of line t are finite, else 0. x [T, n], contiguous; finite int32 [T]."""
    lines, n = x.shape
    assert x.is_contiguous()
    if lines:
        block = triton.next_power_of_2(n)
        finite_kernel[(lines,)](
            x, finite, n, BLOCK=block, num_warps=min(8, max(1, block // 512)), **launch_options(x.device)
        )
