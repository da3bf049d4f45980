"""Reports the log-probabilities of prompts, each once. Knows rows and their scores, never how they are computed."""

from collections.abc import Iterable

from services.worker.engine import packing
from services.worker.engine.packing import SlotEdits
from services.worker.job import Job, PromptScores
from services.worker.planner.planner import Row
from services.worker.runners.base import Scores


class ScoredPrompts:
    """The prompts of running jobs that ask for log-probabilities. Lives on the engine's thread."""

    def __init__(self) -> None:
        self._reported: dict[int, int] = {}
        """Positions of each job's prompt that were reported, by the job's key."""

    def add(self, job: Job) -> None:
        """Report the prompt's log-probabilities if the job asks for them."""
        if job.params.prompt_logprobs is not None:
            self._reported[job.key] = 0

    def forget(self, key: int) -> None:
        """The job has ended."""
        self._reported.pop(key, None)

    def edits(self, rows: Iterable[Row]) -> list[SlotEdits]:
        """The edits of a step that request scores of its rows."""
        if not self._reported:
            return []
        return [edit for edit in map(packing.score, rows) if edit is not None]

    def report(self, row: Row, scores: Scores) -> list[PromptScores]:
        """The scores of a computed row that were not reported yet, if any: after a pause a prompt is computed again."""
        key, (logprobs, tops) = row.sequence.job.key, scores
        begin = max(row.start, self._reported.get(key, 0))
        if len(logprobs) <= begin - row.start:
            return []
        self._reported[key] = row.start + len(logprobs)
        new = slice(begin - row.start, None)
        return [PromptScores(key, begin + 1, logprobs[new], tops[new])]
