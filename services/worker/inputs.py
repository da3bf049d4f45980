"""A step as one packed int32 array: edits to device slots, then ragged rows. Knows the format, not who reads it.

    header   words of edits, rows, tokens
    edits    each: operation, slot, number of words, words
    rows     each: slot, tokens, samples (0 or 1)
    ids      of the tokens, row by row (-1: the slot's last token)

A slot holds what the device must remember of a sequence: block table, position, last token, sampling state. So a step
of answers sends four words for each, and a token that is still on the device needs no round trip. Floats go as bits.
"""

import enum
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.batching import Row
from services.worker.sequence import Sequence as Job

Words = npt.NDArray[np.int32]
HEADER_WORDS = EDIT_WORDS = 3
"""Before the edits, and of an edit before its own words."""
_ROW_WORDS = 3
_THREE = struct.Struct("=3i")
_STATE = struct.Struct("=7i6f")


class Edit(enum.IntEnum):
    """What an edit does to its slot."""

    RELEASE = 0
    """The slot is empty. No words."""
    ADMIT = 1
    """A sequence takes the slot. A SlotState."""
    BLOCKS = 2
    """New blocks: place of the first one in the table, then the blocks."""
    HISTORY = 3
    """For penalties: tokens of the prompt, then all token ids the sequence has."""
    BIAS = 4
    """For logit_bias: token ids, then as many floats."""
    BAN = 5
    """For min_tokens: the position from which they are allowed, then token ids."""


_EDITS = tuple(Edit)


class SlotState(NamedTuple):
    """What ADMIT says of a sequence."""

    computed: int
    """Its tokens that are computed already."""
    boundary: int
    """Tokens of its prompt: draws are keyed by the position in the answer."""
    seed_low: int
    seed_high: int
    sample_index: int
    top_k: int
    logprobs: int
    """-1: not asked."""
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    def words(self) -> "array[int]":
        """In the order of the fields."""
        return array("i", _STATE.pack(*self))

    @classmethod
    def read(cls, words: Words) -> "SlotState":
        """The inverse of `words`."""
        return cls(*_STATE.unpack(words.data))


# ---- writing ----


@dataclass(frozen=True, slots=True)
class SlotEdits:
    """Edits of one slot. Until its row has advanced, they may be applied again."""

    slot: int
    words: "array[int]"


def pack(slot_edits: Iterable[SlotEdits], rows: Iterable[Row]) -> Words:
    """A step: edits, then rows."""
    edits: array[int] = array("i")
    for slot_edit in slot_edits:
        edits += slot_edit.words
    columns: array[int] = array("i")
    ids: array[int] = array("i")
    for row in rows:
        job = row.sequence
        columns.extend((_slot(job), row.tokens, row.samples))
        if row.start < job.prefill_end:
            ids.extend(job.tokens[row.start : row.start + row.tokens])
        else:
            ids.append(-1)
    header = array("i", (len(edits), len(columns) // _ROW_WORDS, len(ids)))
    return np.frombuffer(header + edits + columns + ids, np.int32)


def release(slot: int) -> SlotEdits:
    """The edit that empties a slot."""
    return SlotEdits(slot, _edit(Edit.RELEASE, slot, array("i")))


def admit(job: Job, eos_token_ids: Iterable[int]) -> SlotEdits:
    """The edits that put a sequence in its slot. Raises struct.error or OverflowError for numbers that do not
    fit."""
    slot, params = _slot(job), job.job.params
    state = SlotState(
        computed=job.found_tokens,
        boundary=job.job.boundary,
        seed_low=_signed(params.seed & 0xFFFFFFFF),
        seed_high=_signed(params.seed >> 32 & 0xFFFFFFFF),
        sample_index=job.job.sample_index,
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
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        edits += _edit(Edit.HISTORY, slot, array("i", [job.job.boundary, *job.tokens]))
    if params.logit_bias:
        words = array("i", params.logit_bias.keys())
        words.frombytes(array("f", params.logit_bias.values()).tobytes())
        edits += _edit(Edit.BIAS, slot, words)
    if job.position < params.min_tokens:
        banned = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        if banned:
            edits += _edit(Edit.BAN, slot, array("i", [params.min_tokens, *sorted(banned)]))
    return SlotEdits(slot, edits)


def new_blocks(job: Job) -> SlotEdits:
    """The edit that tells the blocks it got since it was last asked."""
    words = array("i", [job.told_blocks, *job.blocks[job.told_blocks :]])
    job.told_blocks = len(job.blocks)
    return SlotEdits(_slot(job), _edit(Edit.BLOCKS, _slot(job), words))


def prompt_alone(ids: list[int], blocks: list[int]) -> Words:
    """A step of one prompt in slot 0, from which nobody samples."""
    state = SlotState(0, len(ids), 0, 0, 0, 0, -1, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    edits = _edit(Edit.ADMIT, 0, state.words()) + _edit(Edit.BLOCKS, 0, array("i", [0, *blocks]))
    return np.frombuffer(array("i", (len(edits), 1, len(ids))) + edits + array("i", (0, len(ids), 0, *ids)), np.int32)


def _edit(operation: Edit, slot: int, words: "array[int]") -> "array[int]":
    return array("i", (operation, slot, len(words))) + words


def _slot(job: Job) -> int:
    assert job.slot is not None, "a sequence without a slot takes no part"
    return job.slot


def _signed(word: int) -> int:
    """The same 32 bits as a signed number."""
    return word - (1 << 32) if word >= 1 << 31 else word


# ---- reading ----


class Rows(NamedTuple):
    """The R rows of a step, in columns."""

    slots: list[int]
    lengths: list[int]
    """Tokens of this step."""
    samples: list[int]
    """0 or 1."""
    ids: Words
    """Of the tokens, row by row; -1 where the slot knows."""


def unpack(words: Words) -> tuple[Sequence[tuple[Edit, int, Words]], Rows]:
    """The edits as (operation, slot, words), and the rows."""
    edit_words, count, ids = _THREE.unpack_from(words.data)
    rows_at = HEADER_WORDS + edit_words
    ids_at = rows_at + count * _ROW_WORDS
    assert len(words) == ids_at + ids, f"{len(words)} words, {ids_at + ids} announced"
    columns = words[rows_at:ids_at].tolist()
    rows = Rows(columns[0::_ROW_WORDS], columns[1::_ROW_WORDS], columns[2::_ROW_WORDS], words[ids_at:])
    return list(_edits(words[HEADER_WORDS:rows_at])), rows


def _edits(words: Words) -> Iterator[tuple[Edit, int, Words]]:
    at = 0
    while at < len(words):
        operation, slot, count = _THREE.unpack_from(words.data, at * words.itemsize)
        end = at + EDIT_WORDS + count
        yield _EDITS[operation], slot, words[at + EDIT_WORDS : end]
        at = end
