"""The packed step: the values that the engine packs are those that the runner unpacks."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine import packing
from services.worker.job import Job, SamplingParams
from services.worker.planner.planner import Row
from services.worker.planner.sequence import Sequence
from services.worker.runners import step
from services.worker.runners.step import Edit, SlotState


def sequence(slot: int, tokens: list[int], prompt_len: int | None = None, **params: Any) -> Sequence:
    job = Job(
        1, tokens, len(tokens) if prompt_len is None else prompt_len, SamplingParams(**{"max_tokens": 50, **params})
    )
    made = Sequence(job, 1, 4, 1000, b"")
    made.slot, made.prefill_end = slot, len(tokens)
    return made


def test_rows_have_the_tokens_that_the_device_has_not_sampled() -> None:
    prompt = sequence(3, [10, 11, 12, 13, 14])
    answering = sequence(0, [20, 21])
    answering.tokens.append(99)  # sampled on the device, which still has it
    words = packing.pack([], [Row(answering, 2, 1, True), Row(prompt, 1, 3, False)])
    assert words.dtype == np.int32
    edits, rows = step.unpack(words)
    assert list(edits) == []
    assert (rows.slots, rows.lengths, rows.samples) == ([0, 3], [1, 3], [1, 0])
    assert rows.ids.tolist() == [-1, 11, 12, 13]


def test_new_blocks_are_sent_once() -> None:
    one = sequence(2, [1, 2, 3])
    one.blocks = [7, 5]
    edits, _ = step.unpack(packing.pack([packing.new_blocks(one)], []))
    assert [(edit, slot, words.tolist()) for edit, slot, words in edits] == [(Edit.BLOCKS, 2, [0, 7, 5])]
    assert one.sent_blocks == 2
    one.blocks.append(9)
    edits, _ = step.unpack(packing.pack([packing.new_blocks(one)], []))
    assert edits[0][2].tolist() == [2, 9]


def test_an_admission_has_the_fields_that_sampling_needs() -> None:
    plain = step.unpack(packing.pack([packing.admit(sequence(1, [1, 2]), (9,))], []))[0]
    assert [edit for edit, _, _ in plain] == [Edit.ADMIT]
    rich = sequence(
        1, [4, 5, 6], 2, presence_penalty=0.5, logit_bias={3: 1.5, 8: -2.0}, min_tokens=4, stop_token_ids=frozenset({8})
    )
    edits = {edit: words for edit, _, words in step.unpack(packing.pack([packing.admit(rich, (9,))], []))[0]}
    assert edits[Edit.HISTORY].tolist() == [2, 4, 5, 6]
    assert edits[Edit.BIAS][:2].tolist() == [3, 8]
    assert edits[Edit.BIAS][2:].view(np.float32).tolist() == [1.5, -2.0]
    assert edits[Edit.BAN].tolist() == [4, 8, 9]


def test_ignored_end_tokens_are_not_banned() -> None:
    ignoring = sequence(1, [4], min_tokens=4, ignore_eos=True)
    assert [edit for edit, _, _ in step.unpack(packing.pack([packing.admit(ignoring, (9,))], []))[0]] == [Edit.ADMIT]


@given(
    seed=st.integers(0, (1 << 64) - 1),
    temperature=st.floats(0, 100, width=32),
    top_k=st.integers(0, (1 << 31) - 1),
    logprobs=st.none() | st.integers(0, 20),
    frequency=st.floats(-2, 2, width=32),
)
def test_slot_state_is_unpacked_as_it_was_packed(
    seed: int, temperature: float, top_k: int, logprobs: int | None, frequency: float
) -> None:
    one = sequence(
        0, [1], seed=seed, temperature=temperature, top_k=top_k, logprobs=logprobs, frequency_penalty=frequency
    )
    ((_, _, words), *_) = step.unpack(packing.pack([packing.admit(one, ())], []))[0]
    state = SlotState.read(words)
    assert (state.seed_low & 0xFFFFFFFF) | (state.seed_high & 0xFFFFFFFF) << 32 == seed
    assert (state.temperature, state.frequency_penalty) == (temperature, frequency)
    assert (state.top_k, state.logprobs) == (top_k, -1 if logprobs is None else logprobs)
