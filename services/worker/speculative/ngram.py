"""Guesses by n-grams: what followed the last tokens where they occurred before in the same sequence.

Knows token ids alone. The idea is prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from array import array
from collections.abc import Sequence

from services.worker.job import Job

LONGEST, SHORTEST = 4, 2
"""Tokens that must have occurred before: the longest run that is found decides."""
SEARCHED_TOKENS = 1 << 15
"""Last tokens of a sequence in which an earlier occurrence is searched."""
_BYTES = 4


class NgramProposer:
    """A `Proposer` that searches each sequence for the last earlier occurrence of its last tokens."""

    def __init__(self) -> None:
        self._joined: dict[int, bytearray] = {}
        """The tokens of each job so far, as bytes: a search through 4,000 of them takes a few microseconds."""

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """The tokens that followed. A continuation that reaches the end of the sequence repeats itself."""
        joined = self._joined.setdefault(job.key, bytearray())
        joined += array("i", token_ids[len(joined) // _BYTES :]).tobytes()
        for length in range(min(LONGEST, len(token_ids) - 1), SHORTEST - 1, -1):
            after = _after_earlier(joined, length)
            if after:
                period = len(token_ids) - after
                return [token_ids[after + offset % period] for offset in range(most)]
        return ()

    def ended(self, job: Job, token_ids: Sequence[int]) -> None:
        """Drop the job's tokens."""
        self._joined.pop(job.key, None)


def _after_earlier(joined: bytearray, length: int) -> int:
    """The index of the token after the last earlier occurrence of the last `length` tokens; 0: there is none."""
    wanted, end = bytes(joined[-length * _BYTES :]), len(joined) - 1
    first = max(len(joined) - SEARCHED_TOKENS * _BYTES, 0)
    while True:
        found = joined.rfind(wanted, first, end)
        if found < 0:
            return 0
        if found % _BYTES == 0:
            return found // _BYTES + length
        end = found + len(wanted) - 1
