"""What the runner's draft model has computed of each sequence, and what it computes next. Knows counts, no tensors.

The draft model's keys and values are in blocks of the same numbers as the sequence's. They are computed when a sequence
is first guessed and then as far as it got; a sequence that is never guessed costs nothing.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

from services.worker.planner.sequence import Sequence
from services.worker.runners.step import CATCH_UP_TOKENS

_STEADY = 2
"""Tokens of a row that are missing at most after a step with guesses: two after one whose guesses were all right. Such
rows compute equally many tokens, because rows of equal length are faster than ragged ones."""


class CatchUp(NamedTuple):
    """Tokens of a sequence that the draft model is to compute."""

    sequence: Sequence
    first: int
    end: int


class _Progress:
    __slots__ = ("computed", "marked", "preemptions")

    def __init__(self, computed: int, marked: int, preemptions: int) -> None:
        self.computed, self.marked, self.preemptions = computed, marked, preemptions


class DraftProgress:
    """The progress of the draft model in all sequences."""

    def __init__(
        self, block_size: int, longest: int, redo_guesses: bool = False, most_caught_up: int = CATCH_UP_TOKENS
    ) -> None:
        """longest: tokens of the draft model's context. redo_guesses: right guesses are computed once more: of draft
        heads because the hidden states before them are known by then, of a parallel draft model because it guesses
        them without having computed them. most_caught_up: most tokens that it computes in a step before its guesses."""
        self._block_size, self._longest, self._redo_guesses = block_size, longest, redo_guesses
        self.most_caught_up = most_caught_up
        self._by_key: dict[int, _Progress] = {}
        self._blocks: set[int] = set()
        """Blocks that hold the draft model's keys and values as well."""
        self._budget = most_caught_up

    def begin_step(self) -> None:
        """A step is planned."""
        self._budget = self.most_caught_up

    def new_blocks(self, sequence: Sequence) -> None:
        """The sequence got blocks that the device was not sent: those beyond its found ones hold nothing of it."""
        first = max(sequence.sent_blocks, sequence.found_tokens // self._block_size)
        self.overwritten(sequence.blocks[first:])

    def overwritten(self, blocks: Iterable[int]) -> None:
        """These blocks got other contents: they hold nothing of the draft model."""
        self._blocks.difference_update(blocks)

    def room(self, sequence: Sequence, most: int) -> int:
        """How many guesses the sequence may have now: none before the draft model has nearly caught up."""
        tokens, progress = len(sequence.tokens), self._progress(sequence)
        most = min(most, self._longest - tokens)
        missing = tokens - progress.computed
        if most <= 0 or missing > self._budget:
            return 0
        self._budget -= missing
        return most

    def missing(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the draft model has not computed."""
        return len(sequence.tokens) - self._progress(sequence).computed

    def behind(self, sequence: Sequence) -> CatchUp | None:
        """The next tokens of a sequence that has to catch up before it is guessed."""
        progress = self._progress(sequence)
        end = min(progress.computed + self._budget, len(sequence.tokens) - 1, self._longest)
        if end - progress.computed < 1 or len(sequence.tokens) >= self._longest:
            return None
        first = progress.computed
        self._budget -= end - first
        self._advance(sequence, progress, end)
        return CatchUp(sequence, first, end)

    def before_guesses(self, sequences: Many[Sequence]) -> list[CatchUp]:
        """What is to be computed for guesses after the last tokens of these sequences, of all that a step guesses."""
        missing = [max(self.missing(sequence), 1) for sequence in sequences]
        steady = max((count for count in missing if count <= _STEADY), default=0)
        ends = [len(sequence.tokens) for sequence in sequences]
        firsts = [max(end - max(count, steady), 0) for end, count in zip(ends, missing, strict=True)]
        return [*map(CatchUp, sequences, firsts, ends)]

    def drawn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of the guesses after the tokens of the sequence, `accepted` were right. The last one is not computed here."""
        kept = 0 if self._redo_guesses else min(accepted, drafted - 1)
        self._advance(sequence, self._progress(sequence), len(sequence.tokens) + kept)

    def ended(self, sequence: Sequence) -> None:
        """The sequence's job has ended."""
        self._by_key.pop(sequence.job.key, None)

    def _progress(self, sequence: Sequence) -> _Progress:
        progress = self._by_key.get(sequence.job.key)
        if progress is None or progress.preemptions != sequence.preemptions:
            whole = sequence.found_tokens // self._block_size
            found = next((at for at in range(whole) if sequence.blocks[at] not in self._blocks), whole)
            progress = _Progress(found * self._block_size, found, sequence.preemptions)
            self._by_key[sequence.job.key] = progress
        return progress

    def _advance(self, sequence: Sequence, progress: _Progress, computed: int) -> None:
        progress.computed = computed
        whole = computed // self._block_size
        self._blocks.update(sequence.blocks[progress.marked : whole])
        progress.marked = max(progress.marked, whole)
