"""A step as one packed int32 array: edits of slots, then ragged rows. Knows the format, not who writes or reads it.

    header   words of edits, rows, tokens
    edits    each: operation, slot, number of words, words
    rows     each: slot, tokens, samples
    ids      of the tokens, row by row (-1: the slot's last token, -2: a guess of the runner's own)

New tokens are drawn after the last `samples` tokens of a row: 0 for a part of a prompt, 1 usually. With 1 + k the last
k tokens are guesses; the runner draws after each as if the guesses before it were the answer, and keeps the draws up to
the first that is not what was guessed.

A slot holds the device's state of one sequence: block table, position, last token, sampling state. So a step of answers
takes four words for each row, and a token that is still on the device needs no round trip. Floats are sent as bits.
"""

import enum
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
LAST_TOKEN, OWN_GUESS = -1, -2
"""Ids whose token the runner has itself."""
MOST_GUESSES = 8
"""Guesses of a row at most."""
CATCH_UP_TOKENS = 512
"""Most tokens that a draft model computes in a step before its guesses, of all sequences together."""
DEVICE_CATCH_UP_TOKENS = 2048
"""The same on a device, which computes them faster."""
HEADER_WORDS = EDIT_WORDS = ROW_WORDS = 3
"""Words before the edits, words of an edit before its data, words of a row."""
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
    DRAFT = 6
    """For OWN_GUESS: tokens of the sequence that the draft model has yet to compute, the last one included. The
    position of the first, then token ids. Holds for this step."""
    FORBID = 7
    """For bad words: position of the next token, number of the answer's last tokens that follow and these tokens; then
    each forbidden sequence of tokens, its length first."""
    MASK = 8
    """The slot draws under masks: its tokens are drawn when `Runner.draw` receives the masks. No words."""
    SCORE = 9
    """For log-probabilities of the prompt: likely tokens to report, then the tokens that come after the row's first
    tokens. Holds for this step."""
    ADAPTER = 10
    """The slot's sequence has an adapter until the slot is empty or admitted anew: which of the adapters' own slots it
    is in, from 1."""


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


@dataclass(slots=True)
class Rows:
    """The R rows of a step, in columns."""

    slots: list[int]
    lengths: list[int]
    """Tokens of this step."""
    samples: list[int]
    """Tokens at the row's end after which a new one is drawn; all but the first of these are guesses."""
    ids: Words
    """The ids of the tokens, row by row, or LAST_TOKEN or OWN_GUESS."""


def unpack(words: Words) -> tuple[Sequence[tuple[Edit, int, Words]], Rows]:
    """The edits as (operation, slot, words), and the rows."""
    view = words.data  # A first token waits for this: after a rest a slice of an array takes several microseconds.
    edit_words, count, ids = view[:HEADER_WORDS].tolist()
    rows_at = HEADER_WORDS + edit_words
    ids_at = rows_at + count * ROW_WORDS
    assert len(view) == ids_at + ids, f"{len(view)} words, {ids_at + ids} announced"
    columns = view[rows_at:ids_at].tolist()
    rows = Rows(columns[0::ROW_WORDS], columns[1::ROW_WORDS], columns[2::ROW_WORDS], words[ids_at:])
    return list(_edits(words, view, rows_at)) if edit_words else [], rows


def _edits(words: Words, view: memoryview, end: int) -> Iterator[tuple[Edit, int, Words]]:
    at = HEADER_WORDS
    while at < end:
        data = at + EDIT_WORDS
        operation, slot, count = view[at:data].tolist()
        at = data + count
        yield _EDITS[operation], slot, words[data:at]
