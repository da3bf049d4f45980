"""Decides on the device how many guesses of a row are right, and moves its slot behind them. Knows slots, no model.

A step with guesses has a sample for each of its tokens: after a row's last known token and after each of its guesses. A
guess is right if it is what was drawn at the place before it; the draws up to the first wrong guess are kept.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.sampling.slot_settings import SlotSettings

_MOST = 16  # tokens of a row, a power of two
_MIX_A, _MIX_B = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA6B)


@triton.jit(do_not_specialize=["forced"])
def accept_kernel(
    tokens,  # int64 [S]: drawn; forced ones are replaced by the guess
    totals,  # float32 [S]
    token_ids,  # int64 [S]
    starts,  # int32 [R + 1]
    slots,  # int64 [S]
    positions,  # int64 [S]
    repetitions, presences, frequencies,  # float32 [slots]
    history,  # int32 [slots, V] or None
    last_token,  # int64 [slots] out
    counts,  # int32 [R] out: draws that are kept; 0: a row without tokens, or one that is not finite
    V,
    forced,  # chance that a guess counts as right, times 2^16; for measurements
    MOST: tl.constexpr, FORCED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    wait(PDL)
    row = tl.program_id(0)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    places = tl.arange(0, MOST)
    inside = places < length
    guessed = places + 1 < length
    drawn = tl.load(tokens + start + places, mask=inside, other=0)
    guess = tl.load(token_ids + start + 1 + places, mask=guessed, other=-1)
    right = guessed & (drawn == guess)
    if FORCED:
        at = tl.load(positions + start + places, mask=inside, other=0).to(tl.uint32)
        mixed = at * _MIX_A + tl.load(slots + start + places, mask=inside, other=0).to(tl.uint32) * _MIX_B
        mixed = (mixed ^ (mixed >> 15)) * _MIX_B
        right = guessed & (((mixed >> 12) & 0xFFFF).to(tl.int32) < forced)
        tl.store(tokens + start + places, guess, mask=right)
        drawn = tl.where(right, guess, drawn)
    count = tl.min(tl.where(right, MOST, places)) + 1
    total = tl.load(totals + start + places, mask=inside, other=0.0)
    odd = tl.sum((total - total != 0.0).to(tl.int32))
    count = tl.where((length > 0) & (odd == 0), count, 0)
    tl.store(counts + row, count)
    if count > 0:
        slot = tl.load(slots + start)
        tl.store(last_token + slot, tl.sum(tl.where(places == count - 1, drawn, 0)))
        if history is not None:
            repetition, presence = tl.load(repetitions + slot), tl.load(presences + slot)
            frequency = tl.load(frequencies + slot)
            penal = tl.abs(repetition - 1.0) + tl.abs(presence) + tl.abs(frequency) > 0.0
            if penal:  # The same token may be drawn twice: (word | 1) + 2 each time, in any order.
                word = history + slot * V + drawn
                tl.atomic_or(word, 1, mask=places < count)
                tl.atomic_add(word, 2, mask=places < count)


def accept(
    tokens: Tensor,
    totals: Tensor,
    token_ids: Tensor,
    starts: Tensor,
    slots: Tensor,
    positions: Tensor,
    settings: SlotSettings,
    last_token: Tensor,
    counts: Tensor,
    forced: float | None = None,
) -> None:
    """counts int32 [R] = draws that each row keeps; last_token[slot] = the last of them; histories count them.

    tokens, token_ids, slots, positions int64 [S], totals float32 [S]: drawn tokens with the logsumexp of their logits,
    the tokens before them, their slots and positions. starts int32 [R + 1]. forced: for measurements, a guess counts as
    right with this chance, and `tokens` gets it.
    """
    s = settings
    accept_kernel[(len(counts),)](
        tokens, totals, token_ids, starts, slots, positions, s.repetition, s.presence, s.frequency, s.history,
        last_token, counts, 0 if s.history is None else s.history.shape[1], int((forced or 0.0) * 65536),
        MOST=_MOST, FORCED=forced is not None, num_warps=1, **launch_options(tokens.device),
    )  # fmt: skip
