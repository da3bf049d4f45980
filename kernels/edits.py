"""Edits of slots between two steps, in one launch: new blocks in their tables, and how admitted sequences sample.

Words, int32: N and A, N places in the tables, N blocks for them, then A lines of LINE words, each a slot and the words
of `services.worker.inputs.SlotState`. No place and no slot twice. The device reads N and A itself, so that a launch can
be part of a graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import begin, launch_options
from kernels.sampling.slot_settings import SlotSettings

HEADER, LINE = 2, 14
"""Words before the first place, and of an admission."""
_BLOCK = 128


@triton.jit
def _copy_float(line, some, slot, column: tl.constexpr, target):
    bits = tl.load(line + column, mask=some, other=0)
    tl.store(target + slot, bits.to(tl.float32, bitcast=True), mask=some)


@triton.jit
def edit_kernel(
    words,  # int32 [HEADER + 2 * N + A * LINE]
    tables,  # int32 [slots * B] out
    seeds, samples, top_ks,  # int64 [slots] out
    temperatures, top_ps, min_ps, repetitions, presences, frequencies,  # float32 [slots] out
    edited,  # int8 [slots] out: an admitted sequence has no edits of its logits yet
    HEADER: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK places and BLOCK lines."""
    begin(PDL)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    N, A = tl.load(words), tl.load(words + 1)
    words += HEADER
    known = here < N
    place = tl.load(words + here, mask=known, other=0)
    tl.store(tables + place, tl.load(words + N + here, mask=known, other=0), mask=known)
    some = here < A
    line = words + 2 * N + here * LINE
    slot = tl.load(line, mask=some, other=0)
    low = tl.load(line + 3, mask=some, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(line + 4, mask=some, other=0).to(tl.int64) << 32
    tl.store(seeds + slot, low | high, mask=some)
    tl.store(samples + slot, tl.load(line + 5, mask=some, other=0).to(tl.int64), mask=some)
    tl.store(top_ks + slot, tl.load(line + 6, mask=some, other=0).to(tl.int64), mask=some)
    _copy_float(line, some, slot, 8, temperatures)
    _copy_float(line, some, slot, 9, top_ps)
    _copy_float(line, some, slot, 10, min_ps)
    _copy_float(line, some, slot, 11, repetitions)
    _copy_float(line, some, slot, 12, presences)
    _copy_float(line, some, slot, 13, frequencies)
    tl.store(edited + slot, tl.zeros([BLOCK], tl.int8), mask=some)


def edit_slots(words: Tensor, most: int, tables: Tensor, settings: SlotSettings) -> None:
    """Apply the words of at most `most` new blocks and as many admissions. tables int32 [slots, B], contiguous."""
    s = settings
    edit_kernel[(triton.cdiv(most, _BLOCK),)](
        words, tables, s.seed, s.sample, s.top_k, s.temperature, s.top_p, s.min_p, s.repetition, s.presence,
        s.frequency, s.edited, HEADER=HEADER, LINE=LINE, BLOCK=_BLOCK, num_warps=4, **launch_options(words.device),
    )  # fmt: skip
