"""A step as one packed int32 array: edits of slots, then ragged rows. Knows the format, not who writes or reads it.

    header   words of edits, rows, tokens
    edits    each: operation, slot, number of words, words
    rows     each: slot, tokens, samples (0 or 1)
    ids      of the tokens, row by row (-1: the slot's last token)

A slot holds the device's state of one sequence: block table, position, last token, sampling state. So a step of answers
takes four words for each row, and a token that is still on the device needs no round trip. Floats are sent as bits.
"""

import enum
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
HEADER_WORDS = EDIT_WORDS = ROW_WORDS = 3
"""Words before the edits, words of an edit before its data, words of a row."""
_THREE = struct.Struct("=3i")
_STATE = struct.Struct("=7i6f")


class Edit(enum.IntEnum):
    """What an edit does to its slot."""

    RELEASE = 0
    """The slot is empty. No words."""
    ADMIT = 1
    """A sequence takes the slot. A SlotState."""
    BLOCKS = 2
    """New blocks: index of the first one in the table, then the blocks."""
    HISTORY = 3
    """For penalties: tokens of the prompt, then all token ids the sequence has."""
    BIAS = 4
    """For logit_bias: token ids, then as many floats."""
    BAN = 5
    """For min_tokens: the position from which they are allowed, then token ids."""


_EDITS = tuple(Edit)


class SlotState(NamedTuple):
    """The data of ADMIT."""

    computed: int
    """Tokens of the sequence whose keys and values are stored already."""
    prompt_len: int
    """Tokens of its prompt: draws are keyed by the position in the answer."""
    seed_low: int
    seed_high: int
    sample_index: int
    top_k: int
    logprobs: int
    """Likely tokens to report with each token; 0: its own log-probability alone; -1: nothing."""
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    def words(self) -> "array[int]":
        """The fields in their order, floats as bits."""
        return array("i", _STATE.pack(*self))

    @classmethod
    def read(cls, words: Words) -> "SlotState":
        """The inverse of `words`."""
        return cls(*_STATE.unpack(words.data))


class Rows(NamedTuple):
    """The R rows of a step, in columns."""

    slots: list[int]
    lengths: list[int]
    """Tokens of this step."""
    samples: list[int]
    """0 or 1."""
    ids: Words
    """Of the tokens, row by row; -1: the slot's last token."""


def unpack(words: Words) -> tuple[Sequence[tuple[Edit, int, Words]], Rows]:
    """The edits as (operation, slot, words), and the rows."""
    edit_words, count, ids = _THREE.unpack_from(words.data)
    rows_at = HEADER_WORDS + edit_words
    ids_at = rows_at + count * ROW_WORDS
    assert len(words) == ids_at + ids, f"{len(words)} words, {ids_at + ids} announced"
    columns = words[rows_at:ids_at].tolist()
    rows = Rows(columns[0::ROW_WORDS], columns[1::ROW_WORDS], columns[2::ROW_WORDS], words[ids_at:])
    return list(_edits(words[HEADER_WORDS:rows_at])), rows


def _edits(words: Words) -> Iterator[tuple[Edit, int, Words]]:
    at = 0
    while at < len(words):
        operation, slot, count = _THREE.unpack_from(words.data, at * words.itemsize)
        end = at + EDIT_WORDS + count
        yield _EDITS[operation], slot, words[at + EDIT_WORDS : end]
        at = end
