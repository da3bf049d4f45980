"""What proposes draft tokens, for rows that compute several tokens at once. Knows token ids, no model."""

from collections.abc import Sequence
from typing import Protocol

from services.worker.job import Job


class Proposer(Protocol):
    """Guesses how sequences continue. A runner computes the guesses in one row and keeps those that it would draw."""

    def propose(self, job: Job, token_ids: Sequence[int], most: int, /) -> Sequence[int]:
        """token_ids: the prompt and the answer so far. -> up to `most` tokens that may follow; none if there is nothing
        to go by. Called between steps from the engine's thread, so it must take much less time than a step."""

    def ended(self, job: Job, token_ids: Sequence[int], /) -> None:
        """The job has ended with these tokens: what is kept of it may be dropped."""
