"""Applies penalties, logit bias and temperature to logits, before the cut. Knows one row at a time.

A row is passed as a tuple: pointer to its logits, history table or None (int32 [slots, V]; bit 0: seen, higher bits:
times generated), bias table or None (float32 [slots, V]: added), offset of its slot in these tables, V, its settings,
in a step with guesses the pointers `guesses` and `places` of `sample`, else None, and the row's number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def settings_of(temperatures, repetitions, presences, frequencies, edited_slots, slot):
    """A slot's settings: temperature, the three penalties, whether any penalty is on, whether there is a bias."""
    repetition, presence = tl.load(repetitions + slot), tl.load(presences + slot)
    frequency = tl.load(frequencies + slot)
    penal = tl.abs(repetition - 1.0) + tl.abs(presence) + tl.abs(frequency) > 0.0
    edited = tl.load(edited_slots + slot) != 0
    return tl.load(temperatures + slot), repetition, presence, frequency, penal, edited


@triton.jit
def shaped(row, ids):
    """Raw logits of the ids, and the same after penalties, bias and temperature, both float32."""
    logits, history, edits, place, V, knobs, guesses, places, number = row
    temperature, repetition, presence, frequency, penal, edited = knobs
    inside = ids < V
    raw = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = raw
    # Exact divisions take most of the time, so they are skipped in rows without penalties.
    if history is not None and penal:
        word = tl.load(history + place + ids, mask=inside, other=0)
        if places is not None:
            for back in range(tl.load(places + number)):
                word = tl.where(ids == tl.load(guesses + number - back), (word | 1) + 2, word)
        x = tl.where((word & 1) == 0, x, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition))
        count = (word >> 1).to(tl.float32)
        x = x - tl.where(count > 0, presence, 0.0) - count * frequency
    if edits is not None and edited:
        x = x + tl.load(edits + place + ids, mask=inside, other=0.0)
    if temperature > 0:
        x = tl.div_rn(x, temperature)
    return raw, x
