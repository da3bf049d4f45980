"""The words of a step for the GPU: from a packed step and what the host knows of slots to the lists of `kernels.slots`.

Knows positions and slots, never tensors of a device.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from kernels import slots
from kernels.attention import brief
from services.worker.inputs import Rows, Words

Array = npt.NDArray[np.int64]
Sizes = tuple[int, int, int]
"""Tokens, rows, rows that sample."""


class Kind(Enum):
    """What all rows of a step have in common, which a graph of such steps counts on."""

    ANSWERS = auto()
    """Each has one token and samples."""
    BRIEF = auto()
    """None sees many keys."""
    ANY = auto()
    """Nothing."""


@dataclass(slots=True)
class StepRows:
    """The R rows of a step, and what the host knows of them."""

    rows: Rows
    slots: Array
    """[R]."""
    lengths: Array
    """[R]: tokens of this step."""
    contexts: Array
    """[R]: tokens seen, those of this step included."""
    sampling: Array
    """[S]: which rows sample."""
    positions: Array
    """[S]: of the new token in its answer."""
    ends: Array = field(init=False)
    """[R]: tokens of the rows up to each, its own included."""
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        """Counts, once."""
        self.ends = np.cumsum(self.lengths)
        self.sizes = int(self.ends[-1]), len(self.slots), len(self.sampling)

    @property
    def answers(self) -> bool:
        """Every row has one token and samples."""
        tokens, rows, samples = self.sizes
        return tokens == rows == samples

    @property
    def kind(self) -> Kind:
        """The first that fits."""
        if self.answers:
            return Kind.ANSWERS
        return Kind.BRIEF if self.contexts.max() <= brief.KEYS else Kind.ANY

    def lay_out(self, words: Words, sizes: Sizes, nobody: int) -> int:
        """Write the lists, filled up to `sizes` with what belongs to the slot of nobody. -> how many words."""
        tokens, count, samples = self.sizes
        total = slots.words_of(*sizes)
        words[:total] = 0
        ids, places, owners, starts, contexts, row_slots, sampled, sample_slots, positions = parts(words, sizes)
        ends = self.ends
        owners[:tokens] = np.repeat(self.slots, self.lengths)
        if len(self.rows.ids) == tokens:
            ids[:tokens] = self.rows.ids
        else:
            ids[:tokens] = -1 - owners[:tokens]
            ids[:tokens][np.repeat(self.rows.given > 0, self.lengths)] = self.rows.ids
        places[tokens:] = -1
        places[:tokens] = np.arange(tokens) + np.repeat(self.contexts - ends, self.lengths)
        starts[1 : count + 1], starts[count + 1 :] = ends, tokens  # rows without tokens are skipped
        contexts[:count], row_slots[:count], row_slots[count:] = self.contexts, self.slots, nobody
        sample_slots[samples:] = nobody
        sampled[:samples], sample_slots[:samples] = ends[self.sampling] - 1, self.slots[self.sampling]
        positions[:samples] = self.positions
        return total


def fill_largest(words: Words, sizes: Sizes, nobody: int) -> None:
    """A step of one row of all tokens, which sees the block of nobody and writes nowhere."""
    _, places, _, starts, contexts, row_slots, _, sample_slots, _ = parts(words, sizes)
    places[:] = -1
    starts[1:] = contexts[0] = sizes[0]
    row_slots[:] = sample_slots[:] = nobody


def fill_empty(words: Words, sizes: Sizes, nobody: int) -> None:
    """A step whose rows are all without tokens."""
    _, places, _, _, _, row_slots, _, sample_slots, _ = parts(words, sizes)
    places[:] = -1
    row_slots[:] = sample_slots[:] = nobody


def parts(words: Words, sizes: Sizes) -> list[Words]:
    """The lists of a step's words, as `kernels.slots` names them."""
    tokens, rows, samples = sizes
    counts = [tokens] * 3 + [rows + 1, rows, rows] + [samples] * 3
    places = slots.places_of(tokens, rows, samples)
    return [words[place : place + count] for place, count in zip(places, counts, strict=False)]
