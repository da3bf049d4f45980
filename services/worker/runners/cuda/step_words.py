"""The words of a step for the GPU: from a packed step and the contexts of its slots to the lists of `kernels.step_io`.

Knows contexts and slots, never tensors of a device. Only Python's numbers, arrays and memory views: a prompt that comes
after an idle time waits for this code, and numpy that has not run for some time takes ten times as long.
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
StagingBuffer = memoryview
"""Words, int32, in pinned host memory."""


class Kind(Enum):
    """A property that all rows of a step share, and that a graph of such steps relies on."""

    ANSWERS = auto()
    """Each has one token and samples."""
    SHORT_CONTEXT = auto()
    """No row attends to more than `short_prefill.KEYS` keys."""
    GUESSES = auto()
    """Each has its last known token and guesses after it, all of which are sampled from."""
    ANY = auto()
    """No common property."""


@dataclass(slots=True)
class StepRows:
    """The R rows of a step with their contexts, S of them sample."""

    rows: Rows
    contexts: list[int]
    """[R]: tokens of the sequence so far, those of this step included."""
    masked: frozenset[int] = frozenset()
    """Slots that draw under masks, later."""
    sampling: list[int] = field(init=False)
    """[S]: the row of each sample."""
    guesses: int = field(init=False)
    """The most guesses of a row; 0: none has any."""
    ends: list[int] = field(init=False)
    """[R]: tokens of all rows up to this one, its own included."""
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        """Counts the rows and tokens once."""
        self.ends = list(itertools.accumulate(self.rows.lengths))
        samples = self.rows.samples
        self.guesses = max(max(samples, default=0) - 1, 0)
        self.sampling = [row for row, count in enumerate(samples) if count]
        if self.guesses:
            assert samples == self.rows.lengths, "guesses beside prompts"
            self.sampling = [row for row, count in enumerate(samples) for _ in range(count)]
        self.sizes = len(self.rows.ids), len(self.ends), len(self.sampling)

    @property
    def afters(self) -> list[int]:
        """[S]: the guesses of its row behind each sample."""
        if not self.guesses:
            return [0] * len(self.sampling)
        return [after for count in self.rows.samples for after in reversed(range(count))]

    @property
    def answers(self) -> bool:
        """Whether every row has one token and samples."""
        tokens, rows, samples = self.sizes
        return tokens == rows == samples

    @property
    def kind(self) -> Kind:
        """The first kind that fits."""
        if self.answers:
            return Kind.ANSWERS
        if self.guesses:
            return Kind.GUESSES
        return Kind.SHORT_CONTEXT if max(self.contexts) <= short_prefill.KEYS else Kind.ANY

    def lay_out(self, words: StagingBuffer, begin: int, sizes: Sizes) -> int:
        """Write the lists from index `begin` on, padded to `sizes`. -> the index after them."""
        tokens, count, samples = self.sizes
        ids, starts, contexts, owners, chosen, end = (begin + place for place in step_io.places_of(*sizes))
        words[ids : ids + tokens] = self.rows.ids.data
        put(words, starts, [0, *self.ends, *[tokens] * (sizes[1] - count)])
        put(words, contexts, [*self.contexts, *[0] * (sizes[1] - count)])
        put(words, owners, self.rows.slots)
        put(words, chosen, [*self._chosen(), *[-1] * (sizes[2] - samples)])
        return end

    def _chosen(self) -> list[int]:
        """[S]: the samples as `kernels.step_io` reads them."""
        if self.guesses:
            place = step_io.GUESS_PLACE.value
            found = [row + place * after for row, after in zip(self.sampling, self.afters, strict=True)]
        else:
            found = self.sampling
        if not self.masked:
            return found
        later = [self.rows.slots[row] in self.masked for row in self.sampling]
        return [-2 - sample if wait else sample for sample, wait in zip(found, later, strict=True)]


def put(words: StagingBuffer, at: int, values: Sequence[int]) -> None:
    """Write these numbers from index `at` on."""
    words[at : at + len(values)] = array("i", values)


def empty_step() -> StepRows:
    """A step without rows."""
    return StepRows(Rows([], [], [], np.empty(0, np.int32)), [])


def padding_step(tokens: int) -> StepRows:
    """A step of one row of `tokens` tokens that belongs to no sequence and writes to padding."""
    return StepRows(Rows([-1], [tokens], [0], np.zeros(tokens, np.int32)), [tokens])
