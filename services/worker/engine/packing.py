"""Packs a planned step into one int32 array. Knows sequences and the format, never who reads it."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.worker.planner.planner import Row
from services.worker.planner.sequence import Sequence
from services.worker.runners.step import LAST_TOKEN, ROW_WORDS, Edit, SlotState, Words


@dataclass(frozen=True, slots=True)
class SlotEdits:
    """Edits of one slot. Until its row has advanced they may be applied again."""

    slot: int
    words: "array[int]"


def pack(slot_edits: Iterable[SlotEdits], rows: Iterable[Row]) -> Words:
    """A step: edits, then rows."""
    edits: list[int] = []
    columns: list[int] = []
    ids: list[int] = []
    for slot_edit in slot_edits:
        edits += slot_edit.words
    for row in rows:
        sequence = row.sequence
        columns += (_slot(sequence), row.tokens, row.samples)
        if row.start < sequence.prefill_end:
            ids += sequence.tokens[row.start : row.start + row.tokens]
        else:
            ids.append(LAST_TOKEN)
            ids += row.guesses
    words = [len(edits), len(columns) // ROW_WORDS, len(ids)]
    words += edits
    words += columns
    words += ids
    return np.frombuffer(array("i", words), np.int32)


def release(slot: int) -> SlotEdits:
    """The edit that empties a slot."""
    return SlotEdits(slot, _edit(Edit.RELEASE, slot, array("i")))


def admit(sequence: Sequence, eos_token_ids: Iterable[int]) -> SlotEdits:
    """The edits that put a sequence in its slot. Raises struct.error or OverflowError for numbers that do not fit."""
    slot, job, params = _slot(sequence), sequence.job, sequence.job.params
    state = SlotState(
        computed=sequence.found_tokens,
        prompt_len=job.prompt_len,
        seed_low=_signed(params.seed & 0xFFFFFFFF),
        seed_high=_signed(params.seed >> 32 & 0xFFFFFFFF),
        sample_index=job.sample_index,
        top_k=params.top_k,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    edits = _edit(Edit.ADMIT, slot, state.words())
    if sequence.adapter_slot:
        edits += _edit(Edit.ADAPTER, slot, array("i", [sequence.adapter_slot]))
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        edits += _edit(Edit.HISTORY, slot, array("i", [job.prompt_len, *sequence.tokens]))
    if params.logit_bias:
        words = array("i", params.logit_bias.keys())
        words.frombytes(array("f", params.logit_bias.values()).tobytes())
        edits += _edit(Edit.BIAS, slot, words)
    if params.structured is not None:
        edits += _edit(Edit.MASK, slot, array("i"))  # The masks also forbid to end before min_tokens.
    elif sequence.position < params.min_tokens:
        banned = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        if banned:
            edits += _edit(Edit.BAN, slot, array("i", [params.min_tokens, *sorted(banned)]))
    if params.bad_sequences:
        edits += _edit(Edit.FORBID, slot, _forbidden(sequence))
    return SlotEdits(slot, edits)


def _forbidden(sequence: Sequence) -> "array[int]":
    """The data of FORBID. Of the answer as much as the longest sequence looks back at."""
    forbidden, answer = sequence.job.params.bad_sequences, sequence.tokens[sequence.job.prompt_len :]
    before = max(map(len, forbidden)) - 1
    last = answer[-before:] if before else []
    words = array("i", [len(answer), len(last), *last])
    for token_ids in forbidden:
        words.extend((len(token_ids), *token_ids))
    return words


def new_blocks(sequence: Sequence) -> SlotEdits:
    """The edit with the blocks that the device was not sent yet; they count as sent from now on."""
    first, blocks = sequence.take_new_blocks()
    slot = _slot(sequence)
    return SlotEdits(slot, _edit(Edit.BLOCKS, slot, array("i", [first, *blocks])))


def draft(sequence: Sequence, first: int, end: int) -> SlotEdits:
    """The edit that makes the draft model compute the sequence's tokens from `first` to `end`."""
    slot = _slot(sequence)
    return SlotEdits(slot, _edit(Edit.DRAFT, slot, array("i", [first, *sequence.tokens[first:end]])))


def score(row: Row) -> SlotEdits | None:
    """The edit that asks for the log-probabilities of the prompt's tokens after those of the row; None if there are
    none."""
    job = row.sequence.job
    targets = row.sequence.tokens[row.start + 1 : min(row.start + row.tokens + 1, job.prompt_len)]
    if job.params.prompt_logprobs is None or not targets:
        return None
    slot = _slot(row.sequence)
    return SlotEdits(slot, _edit(Edit.SCORE, slot, array("i", [job.params.prompt_logprobs, *targets])))


def prompt_alone(ids: list[int], blocks: list[int]) -> Words:
    """A step of one prompt in slot 0, with these blocks, from which nothing is sampled."""
    state = SlotState(0, len(ids), 0, 0, 0, 0, -1, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    edits = _edit(Edit.ADMIT, 0, state.words()) + _edit(Edit.BLOCKS, 0, array("i", [0, *blocks]))
    return np.frombuffer(array("i", (len(edits), 1, len(ids))) + edits + array("i", (0, len(ids), 0, *ids)), np.int32)


def _edit(operation: Edit, slot: int, words: "array[int]") -> "array[int]":
    return array("i", (operation, slot, len(words))) + words


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, f"job {sequence.job.key} has a row but no slot"
    return sequence.slot


def _signed(word: int) -> int:
    """The same 32 bits as a signed number."""
    return word - (1 << 32) if word >= 1 << 31 else word
