"""Tokens of prompts whose log-probabilities a step reports: which lines of the step show them. Knows no tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.worker.runners.base import Scores, Top
from services.worker.runners.step import Rows


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """E lines of a step, row by row."""

    rows: list[int]
    """The indices of the rows."""
    counts: list[int]
    """Lines of each row."""
    tops: list[int]
    """Likely tokens that each row asks for."""
    lines: list[int]
    """[E]: indices among the tokens of the step."""
    targets: list[int]
    """[E]: the token after each line."""

    @classmethod
    def of(cls, asked: Mapping[int, Sequence[int]], rows: Rows) -> "ScoredRows":
        """asked: the data of SCORE by slot."""
        starts = [0, *accumulate(rows.lengths)]
        made = cls([], [], [], [], [])
        for row, slot in enumerate(rows.slots):
            if slot in asked:
                most, *targets = asked[slot]
                made.rows.append(row)
                made.counts.append(len(targets))
                made.tops.append(most)
                made.lines.extend(range(starts[row], starts[row] + len(targets)))
                made.targets.extend(targets)
        return made

    @property
    def most(self) -> int:
        """Likely tokens that the row asks for that asks for most."""
        return max(self.tops, default=0)

    def divide(self, logprobs: list[float], ids: list[list[int]], values: list[list[float]]) -> dict[int, Scores]:
        """The results of all lines, by row."""
        found: dict[int, Scores] = {}
        at = 0
        for row, count, most in zip(self.rows, self.counts, self.tops, strict=True):
            lines = range(at, at + count)
            tops: list[Top] = [list(zip(ids[line][:most], values[line][:most], strict=True)) for line in lines]
            found[row] = logprobs[at : at + count], tops
            at += count
        return found
