"""Begins and ends passes of a draft model on the device. Knows rows and slots, no model.

`follow` makes the words of a first pass behind a step that checks guesses. `advance` ends a pass: its guesses go to the
table that the next such step reads, and the words become those of the next pass.

The words of a pass, int32: those of a step of R rows of one token each, as `kernels.step_io` defines them; then two
lists of R, each at a multiple of four words:

    places    where the row's next guess goes in the table
    wanted    guesses that the row still wants
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels import step_io
from kernels.dependent_launch import launch_options, wait

_BLOCK = 64
MOST_FOLLOWED = 64
"""Rows of a step that is followed, at most."""


@triton.jit(do_not_specialize=["R"])
def advance_kernel(
    drawn,  # int64 [R]
    slots,  # int64 [R]
    last_token,  # int64 [slots] out
    words,  # int32, as above; out
    guesses,  # int32 out: the table
    R,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK rows. A row that has all its guesses has no context, slot and sample in the next pass."""
    wait(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < R
    contexts = words + tl.cdiv(R, 4) * 4 + tl.cdiv(R + 1, 4) * 4 + rows
    owners = contexts + tl.cdiv(R, 4) * 4
    chosen = owners + tl.cdiv(R, 4) * 4
    places = chosen + tl.cdiv(R, 4) * 4
    wanted = places + tl.cdiv(R, 4) * 4
    left = tl.load(wanted, mask=inside, other=0)
    guessed, goes_on = left > 0, left > 1
    token = tl.load(drawn + rows, mask=guessed, other=0)
    place = tl.load(places, mask=guessed, other=0)
    tl.store(guesses + place, token.to(tl.int32), mask=guessed)
    tl.store(last_token + tl.load(slots + rows, mask=guessed, other=0), token, mask=guessed)
    tl.store(places, place + 1, mask=guessed)
    tl.store(wanted, left - 1, mask=guessed)
    tl.store(words + rows, -1, mask=inside)
    tl.store(contexts, tl.load(contexts, mask=goes_on, other=-1) + 1, mask=inside)
    tl.store(owners, -1, mask=inside & ~goes_on)
    tl.store(chosen, -1, mask=inside & ~goes_on)


def advance(drawn: Tensor, slots: Tensor, last_token: Tensor, words: Tensor, guesses: Tensor) -> None:
    """Put the tokens drawn, int64 [R], to their places in the table, int32, and to last_token[slots], and make `words`
    those of the next pass, which reads the last token of each slot."""
    rows = len(drawn)
    advance_kernel[(triton.cdiv(rows, _BLOCK),)](
        drawn, slots, last_token, words, guesses, rows, BLOCK=_BLOCK, num_warps=2, **launch_options(words.device)
    )


@triton.jit(do_not_specialize=["T", "R", "count", "held", "longest"])
def follow_kernel(
    checked,  # int32: the words of the step, as `kernels.step_io` defines them
    kept,  # int32 [R]: draws that each row keeps
    last_token,  # int64 [slots]
    guesses,  # int32 [slots, MOST]: the table
    words,  # int32 out: as above for `held` rows, then those of a step of `held` rows of up to `longest` tokens
    T, R, count, held, longest,
    MOST: tl.constexpr, REDO: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows; those without guesses, or without a draw, get no tokens."""
    wait(PDL)
    rows = tl.arange(0, BLOCK)
    inside, lists = rows < held, tl.cdiv(held, 4) * 4
    starts = checked + tl.cdiv(T, 4) * 4
    contexts = starts + tl.cdiv(R + 1, 4) * 4
    some = rows < count
    length = tl.load(starts + 1 + rows, mask=some, other=0) - tl.load(starts + rows, mask=some, other=0)
    draws = tl.load(kept + rows, mask=some, other=0)
    on = (length > 1) & (draws > 0)
    slot = tl.load(contexts + tl.cdiv(R, 4) * 4 + rows, mask=some, other=0)
    context = tl.where(on, tl.load(contexts + rows, mask=some, other=0) - length + draws + 1, 0)
    last = tl.load(last_token + slot.to(tl.int64), mask=on, other=0).to(tl.int32)
    owner, chosen = tl.where(on, slot, -1), tl.where(on, rows, -1)

    # The words of one token a row, which `advance` makes those of the second pass.
    begins = words + lists
    tl.store(words + rows, last, mask=inside)
    tl.store(begins + rows, tl.minimum(rows, count), mask=rows <= held)
    ends = begins + tl.cdiv(held + 1, 4) * 4
    tl.store(ends + rows, context, mask=inside)
    tl.store(ends + lists + rows, owner, mask=inside)
    tl.store(ends + 2 * lists + rows, chosen, mask=inside)
    tl.store(ends + 3 * lists + rows, slot * MOST, mask=inside)
    tl.store(ends + 4 * lists + rows, tl.where(on, length - 1, 0), mask=inside)

    # The words of the first pass: the last draws of each row, of which all but the last one were guesses.
    ids = ends + 5 * lists
    tokens = tl.where(on, draws if REDO else 1 + (draws == length).to(tl.int32), 0)
    end = tl.cumsum(tokens, 0)
    behind = tl.arange(0, 2 * MOST)[None, :]  # how many of the row's tokens come after this one
    place = (draws - 2)[:, None] - behind
    earlier = (behind + 1 < tokens[:, None]) & (place >= 0)
    right = tl.load(guesses + (slot.to(tl.int64) * MOST)[:, None] + place, mask=earlier, other=0)
    tl.store(ids + (end - 2)[:, None] - behind, right, mask=earlier)
    tl.store(ids + end - 1, last, mask=on)
    begins = ids + tl.cdiv(longest * held, 4) * 4
    tl.store(begins + rows, end - tokens, mask=rows <= held)
    ends = begins + tl.cdiv(held + 1, 4) * 4
    tl.store(ends + rows, context, mask=inside)
    tl.store(ends + lists + rows, owner, mask=inside)
    tl.store(ends + 2 * lists + rows, chosen, mask=inside)


def follow(
    checked: Tensor, sizes: tuple[int, int, int], count: int, kept: Tensor, last_token: Tensor, guesses: Tensor,
    words: Tensor, held: int, longest: int = 2, redo: bool = False,
) -> None:  # fmt: skip
    """Make `words` those of the passes of `held` rows behind a step that checks guesses, before the host has its
    results: of a first pass of up to `longest` tokens a row behind those of a pass of one token. The first pass has the
    last draw of each row, and the last guess where all were right, as nothing has computed it; redo: all draws.

    checked int32: the words of the step, of these sizes and with `count` rows, at most MOST_FOLLOWED. kept int32 [R]:
    draws that each row keeps; last_token int64 [slots]: the last of them; guesses int32 [slots, most]: the table. A row
    wants as many guesses as it had.
    """
    assert count <= held <= MOST_FOLLOWED, (count, held)
    follow_kernel[(1,)](
        checked, kept, last_token, guesses, words, sizes[0], sizes[1], count, held, longest,
        MOST=guesses.shape[1], REDO=redo, BLOCK=2 * MOST_FOLLOWED, num_warps=4, **launch_options(words.device),
    )  # fmt: skip


def lists_of(rows: int) -> tuple[int, int, int]:
    """Offset of the places and of the wanted guesses in the words of a pass, and the end of these."""
    places, length = step_io.words_of(rows, rows, rows), step_io.aligned(rows)
    return places, places + length, places + 2 * length
