"""Applies edits of slots between two steps in one launch: new blocks of tables, sampling settings of new sequences.

The words, int32: a header of HEADER words with N, A and the position of the list of offsets; there N + A offsets,
counted from the end of this list; then edits as `services.worker.runners.step` packs them: N with new blocks, then A
admissions. No table entry and no slot occurs twice. The device reads N and A itself, so that the launch can be part of
a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.sampling.slot_settings import SlotSettings

HEADER = 4
"""Words of the header; the last is unused."""
_BLOCK, _PROGRAMS = 128, 64


@triton.jit
def _copy_float(state, column: tl.constexpr, target):
    tl.store(target, tl.load(state + column).to(tl.float32, bitcast=True))


@triton.jit
def edit_kernel(
    words,  # int32, as above
    tables,  # int32 [slots, B] out
    prompt_lens, seeds, samples, top_ks,  # int64 [slots] out
    temperatures, top_ps, min_ps, repetitions, presences, frequencies,  # float32 [slots] out
    edited,  # int8 [slots] out: an admitted sequence has no edits of its logits yet
    B,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p applies edits p, p + programs and so on."""
    wait(PDL)
    N, A = tl.load(words), tl.load(words + 1)
    places = words + tl.load(words + 2)
    for number in range(tl.program_id(0), N + A, tl.num_programs(0)):
        edit = places + N + A + tl.load(places + number)  # operation, slot, number of words, words
        slot, count, data = tl.load(edit + 1).to(tl.int64), tl.load(edit + 2), edit + 3
        if number < N:
            table = tables + slot * B + tl.load(data)
            for start in range(0, count - 1, BLOCK):
                here = start + tl.arange(0, BLOCK)
                known = here < count - 1
                tl.store(table + here, tl.load(data + 1 + here, mask=known, other=0), mask=known)
        else:
            tl.store(prompt_lens + slot, tl.load(data + 1).to(tl.int64))
            low = tl.load(data + 2).to(tl.int64) & 0xFFFFFFFF
            tl.store(seeds + slot, low | tl.load(data + 3).to(tl.int64) << 32)
            tl.store(samples + slot, tl.load(data + 4).to(tl.int64))
            tl.store(top_ks + slot, tl.load(data + 5).to(tl.int64))
            _copy_float(data, 7, temperatures + slot)
            _copy_float(data, 8, top_ps + slot)
            _copy_float(data, 9, min_ps + slot)
            _copy_float(data, 10, repetitions + slot)
            _copy_float(data, 11, presences + slot)
            _copy_float(data, 12, frequencies + slot)
            tl.store(edited + slot, 0)


def edit_slots(words: Tensor, tables: Tensor, settings: SlotSettings) -> None:
    """Apply the words. tables int32 [slots, B], contiguous."""
    s = settings
    edit_kernel[(_PROGRAMS,)](
        words, tables, s.prompt_len, s.seed, s.sample, s.top_k, s.temperature, s.top_p, s.min_p, s.repetition,
        s.presence, s.frequency, s.edited, tables.shape[1], BLOCK=_BLOCK, num_warps=4, **launch_options(words.device),
    )  # fmt: skip
