"""Begins and ends the pass of a parallel draft model on the device. Knows rows and slots, no model.

A parallel draft model makes all guesses of a step in one pass. A row has its last draws, the last known token among
them, and then a mask token for each guess but the first. The first guess is drawn after the last known token, each
later one after a mask.

The words of a pass of R rows with up to `depth` guesses each are those of a step with guesses, as `kernels.step_io`
defines them, but not all of its tokens are sampled from: sample s is guess s % depth of row s // depth.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.drafts.draft_pass import MOST_FOLLOWED
from kernels.step_io import GUESS_PLACE

_BLOCK = 128


@triton.jit(do_not_specialize=["T", "R", "count", "held", "depth", "wanted", "mask_token"])
def begin_masks_kernel(
    checked,  # int32: the words of the step, as `kernels.step_io` defines them
    kept,  # int32 [R]: draws that each row keeps
    last_token,  # int64 [slots]
    guesses,  # int32 [slots, MOST]: the table
    words,  # int32 out: those of a pass of `held` rows
    T, R, count, held, depth, wanted, mask_token,
    MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows; those without guesses, or without a draw, get no tokens."""
    wait(PDL)
    rows = tl.arange(0, BLOCK)
    inside, some = rows < held, rows < count
    starts = checked + tl.cdiv(T, 4) * 4
    contexts = starts + tl.cdiv(R + 1, 4) * 4
    had = tl.load(starts + 1 + rows, mask=some, other=1) - tl.load(starts + rows, mask=some, other=0) - 1
    draws = tl.load(kept + rows, mask=some, other=0)
    on = (had > 0) & (draws > 0)
    wanted = tl.where(wanted > 0, wanted, had)
    slot = tl.load(contexts + tl.cdiv(R, 4) * 4 + rows, mask=some, other=0)
    context = tl.load(contexts + rows, mask=some, other=0) - had + draws + wanted - 1
    last = tl.load(last_token + slot.to(tl.int64), mask=on, other=0).to(tl.int32)

    tokens = tl.where(on, draws + wanted - 1, 0)
    end = tl.cumsum(tokens, 0)
    place = tl.arange(0, 2 * MOST)[None, :]
    right = place < draws[:, None] - 1
    guess = tl.load(guesses + (slot.to(tl.int64) * MOST)[:, None] + place, mask=on[:, None] & right, other=0)
    id = tl.where(right, guess, tl.where(place == draws[:, None] - 1, last[:, None], mask_token))
    tl.store(words + (end - tokens)[:, None] + place, id, mask=place < tokens[:, None])

    begins = words + tl.cdiv(2 * depth * held, 4) * 4
    tl.store(begins + rows, end - tokens, mask=rows <= held)
    ends, lists = begins + tl.cdiv(held + 1, 4) * 4, tl.cdiv(held, 4) * 4
    tl.store(ends + rows, tl.where(on, context, 0), mask=inside)
    tl.store(ends + lists + rows, tl.where(on, slot, -1), mask=inside)
    number = tl.arange(0, MOST)[None, :]
    sample = rows[:, None] + GUESS_PLACE * (wanted[:, None] - 1 - number)
    sample = tl.where(on[:, None] & (number < wanted[:, None]), sample, -1)
    tl.store(ends + 2 * lists + (rows * depth)[:, None] + number, sample, mask=inside[:, None] & (number < depth))


def begin(
    checked: Tensor, sizes: tuple[int, int, int], count: int, kept: Tensor, last_token: Tensor, guesses: Tensor,
    words: Tensor, held: int, depth: int, wanted: int, mask_token: int,
) -> None:  # fmt: skip
    """Make `words` those of a pass of `held` rows, of up to 2 * `depth` tokens each, behind a step that checks guesses,
    before the host has its results.

    checked int32: the words of the step, of these sizes and with `count` rows, at most MOST_FOLLOWED. kept int32 [R]:
    draws that each row keeps; last_token int64 [slots]: the last of them; guesses int32 [slots, most]: the table. A row
    with guesses gets `wanted` next, at most `depth`; 0: as many as it had.
    """
    assert count <= held <= MOST_FOLLOWED, (count, held)
    begin_masks_kernel[(1,)](
        checked, kept, last_token, guesses, words, sizes[0], sizes[1], count, held, depth, wanted,
        mask_token, MOST=guesses.shape[1], BLOCK=2 * MOST_FOLLOWED, num_warps=4, **launch_options(words.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["S", "depth"])
def store_guesses_kernel(
    drawn,  # int64 [S]
    slots,  # int64 [S]
    guesses,  # int32 [slots, MOST] out: the table
    S, depth,
    MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK samples. Those of no row write to the last slot, which no sequence has."""
    wait(PDL)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < S
    token = tl.load(drawn + here, mask=inside, other=0)
    slot = tl.load(slots + here, mask=inside, other=0)
    tl.store(guesses + slot * MOST + here % depth, token.to(tl.int32), mask=inside)


def store(drawn: Tensor, slots: Tensor, guesses: Tensor, depth: int) -> None:
    """Put the tokens drawn in a pass with `depth` samples a row, int64 [S], to their places in the table of their
    slots, int64 [S]: guesses int32 [slots, most]."""
    samples = len(drawn)
    store_guesses_kernel[(triton.cdiv(samples, _BLOCK),)](
        drawn, slots, guesses, samples, depth,
        MOST=guesses.shape[1], BLOCK=_BLOCK, num_warps=2, **launch_options(guesses.device),
    )  # fmt: skip
