"""The words of a step for the GPU: from a packed step and what the host knows of slots to the lists of
`kernels.step_io`.

Knows contexts and slots, never tensors of a device. Python's own numbers, arrays and views of memory alone: a prompt
that comes after a rest waits for this, and numpy that has rested takes ten times its time.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from kernels import step_io
from kernels.attention import short_prefill
from services.worker.runners.step import Rows

Sizes = tuple[int, int, int]
"""Tokens, rows, rows that sample."""
Stage = memoryview
"""Words, int32, in host memory."""


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
    contexts: list[int]
    """[R]: tokens seen, those of this step included."""
    sampling: list[int] = field(init=False)
    """[S]: which rows sample."""
    ends: list[int] = field(init=False)
    """[R]: tokens of the rows up to each, its own included."""
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        """Counts, once."""
        self.ends = list(itertools.accumulate(self.rows.lengths))
        self.sampling = [row for row, samples in enumerate(self.rows.samples) if samples]
        self.sizes = len(self.rows.ids), len(self.ends), len(self.sampling)

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
        return Kind.BRIEF if max(self.contexts) <= short_prefill.KEYS else Kind.ANY

    def lay_out(self, words: Stage, begin: int, sizes: Sizes) -> int:
        """Write the lists from `begin` on, filled up to `sizes` with what is nobody's. -> where they end."""
        tokens, count, samples = self.sizes
        ids, starts, contexts, owners, chosen, end = (begin + place for place in step_io.places_of(*sizes))
        words[ids : ids + tokens] = self.rows.ids.data
        put(words, starts, [0, *self.ends, *[tokens] * (sizes[1] - count)])
        put(words, contexts, [*self.contexts, *[0] * (sizes[1] - count)])
        put(words, owners, self.rows.slots)
        put(words, chosen, [*self.sampling, *[-1] * (sizes[2] - samples)])
        return end


def put(words: Stage, at: int, values: Sequence[int]) -> None:
    """Write these numbers there."""
    words[at : at + len(values)] = array("i", values)


def nothing() -> StepRows:
    """A step without rows."""
    return StepRows(Rows([], [], [], np.empty(0, np.int32)), [])


def padding_step(tokens: int) -> StepRows:
    """A step of one row of so many tokens, which is nobody's and writes nowhere."""
    return StepRows(Rows([-1], [tokens], [0], np.zeros(tokens, np.int32)), [tokens])
