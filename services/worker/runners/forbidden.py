"""The bad words of one slot: which tokens may not follow an answer. Knows positions and token ids, no device.

A sequence of n tokens bans its last token wherever the answer ends with the n - 1 tokens before it.
"""

from collections.abc import Sequence

from services.worker.runners.step import Words


class Forbidden:
    """The data of the edit FORBID, and the answer's last tokens."""

    def __init__(self, words: Words) -> None:
        values = words.tolist()
        position, count = values[:2]
        self.sequences: list[list[int]] = []
        at = 2 + count
        while at < len(values):
            self.sequences.append(values[at + 1 : at + 1 + values[at]])
            at += 1 + values[at]
        self.before = max(map(len, self.sequences)) - 1
        """Tokens that the longest sequence looks back at."""
        self._first = position - count
        self._answer: list[int] = values[2 : 2 + count]

    def add(self, position: int, token: int) -> None:
        """The answer has this token at this position; all positions before it were added. May be repeated."""
        del self._answer[position - self._first :]
        self._answer.append(token)
        if len(self._answer) > 2 * self.before + 64:
            dropped = len(self._answer) - self.before - 1
            del self._answer[:dropped]
            self._first += dropped

    def last(self, position: int) -> list[int]:
        """The tokens that the longest sequence looks back at from this position; fewer at the answer's beginning."""
        end = position - self._first
        return self._answer[max(end - self.before, 0) : end]

    def banned(self, position: int) -> list[int]:
        """The tokens that may not come at this position, all before which were added."""
        last = self.last(position)
        return [each[-1] for each in self.sequences if ends_with(last, each[:-1])]


def ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    """Whether the tokens end with these."""
    return len(end) <= len(tokens) and list(tokens[len(tokens) - len(end) :]) == list(end)
