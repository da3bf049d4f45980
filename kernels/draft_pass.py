"""Ends a pass of a draft model: its guesses go to the table that the step which checks them reads, and the words become
those of the next pass. Knows rows and slots, no model.

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


def lists_of(rows: int) -> tuple[int, int, int]:
    """Offset of the places and of the wanted guesses in the words of a pass, and the end of these."""
    places, length = step_io.words_of(rows, rows, rows), step_io.aligned(rows)
    return places, places + length, places + 2 * length
