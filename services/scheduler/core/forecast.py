"""When a waiting job would get its worker, its first token and its last one. Knows rates and counts, never jobs.

All forecasts are optimistic: what is not measured yet takes no time, so no job is refused for lack of a measurement.
"""

from collections.abc import Sequence
from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """How fast one healthy worker is and what it has to do; rates are 0 while unknown.

    `uncached_tokens` is the part of the new job's prompt that this worker would have to compute.
    """

    credits: int
    free_credits: int
    backlog_tokens: float
    uncached_tokens: int
    prefill_rate: float
    decode_s: float

    def first_token_s(self) -> float:
        """Seconds from the job's assignment to this worker to its first token."""
        if not self.prefill_rate:
            return 0.0
        return (self.backlog_tokens + self.uncached_tokens) / self.prefill_rate

    def answer_s(self, tokens: float) -> float:
        """Seconds from the job's assignment to this worker to the last of `tokens` tokens."""
        return self.first_token_s() + tokens * self.decode_s


class QueuePosition(NamedTuple):
    """What waits before a job: how many jobs, their prompt tokens, and the average length of an answer in tokens."""

    jobs: int
    prompt_tokens: int
    answer_tokens: float


def wait_s(workers: Sequence[WorkerLoad], position: QueuePosition) -> float:
    """Seconds until a job at this position gets a credit: the longer of the times that the prompts before it and the
    answers take.

    Credits become free at a rate of `credits / residence`, where residence is the decode time of an average answer.
    """
    if not position.jobs and any(worker.free_credits for worker in workers):
        return 0.0
    slots = sum(worker.credits for worker in workers)
    residence_s = position.answer_tokens * min((worker.decode_s for worker in workers), default=0.0)
    decoding_s = (position.jobs + 1) * residence_s / max(slots, 1)
    rates = [worker.prefill_rate for worker in workers]
    prefilling_s = position.prompt_tokens / sum(rates) if rates and all(rates) else 0.0
    return max(decoding_s, prefilling_s)


def answer_s(workers: Sequence[WorkerLoad], tokens: float) -> float:
    """Seconds from a job's assignment to the last of `tokens` tokens, on the best worker."""
    return min((worker.answer_s(tokens) for worker in workers), default=0.0)
