"""Whether a job may wait at all, or a worker join: refusals, and the forecast of a job's first token. Knows rates and
counts, never jobs.

All forecasts are optimistic: what is not measured yet takes no time, so nobody is refused by ignorance.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.hashing import KEY_BYTES
from services.scheduler.messages import Card, Code, Failure, WorkerHello


class Pace(NamedTuple):
    """How fast one healthy worker is and what it has to do; rates are 0 while unknown.

    `uncached_tokens` is what is left of the job in question's prompt on this worker.
    """

    credits: int
    free_credits: int
    backlog_tokens: float
    uncached_tokens: int
    prefill_rate: float
    decode_s: float

    def first_token_s(self) -> float:
        """Seconds from placement here to the job's first token."""
        if not self.prefill_rate:
            return 0.0
        return (self.backlog_tokens + self.uncached_tokens) / self.prefill_rate


class QueuePosition(NamedTuple):
    """What waits before the job: how many jobs, their prompt tokens, and the tokens a typical answer has."""

    jobs: int
    prompt_tokens: int
    answer_tokens: float


def wait_s(workers: Sequence[Pace], ahead: QueuePosition) -> float:
    """Seconds until a credit comes to a job: the larger of what prompts and what answers before it take.

    Credits come free at `credits / residence`, where residence is the decode time of a typical answer.
    """
    if not ahead.jobs and any(worker.free_credits for worker in workers):
        return 0.0
    slots = sum(worker.credits for worker in workers)
    residence_s = ahead.answer_tokens * min((worker.decode_s for worker in workers), default=0.0)
    decoding_s = (ahead.jobs + 1) * residence_s / max(slots, 1)
    rates = [worker.prefill_rate for worker in workers]
    prefilling_s = ahead.prompt_tokens / sum(rates) if rates and all(rates) else 0.0
    return max(decoding_s, prefilling_s)


def first_token_s(workers: Sequence[Pace], ahead: QueuePosition) -> float:
    """Seconds until a new job's first token: its wait, then backlog and own prompt on the best worker."""
    return wait_s(workers, ahead) + min((worker.first_token_s() for worker in workers), default=0.0)


# ---- refusals ----


def model_not_found() -> Failure:
    """Nobody serves this model, and nobody did of late."""
    return Failure(Code.NOT_FOUND, "MODEL_NOT_FOUND", "no such model is served", field="model")


def no_worker(retry_after_s: float) -> Failure:
    """The model is known, but no healthy worker serves it now."""
    return Failure(Code.UNAVAILABLE, "NO_WORKER", "no healthy worker serves this model now", retry_after_s)


def queue_full(retry_after_s: float) -> Failure:
    """As many jobs wait as may."""
    return Failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue of this model is full", retry_after_s)


def deadline_unmeetable() -> Failure:
    """The first token would come after the deadline."""
    return Failure(Code.DEADLINE_EXCEEDED, "DEADLINE_UNMEETABLE", "the first token is not expected before the deadline")


def deadline_expired() -> Failure:
    """The deadline passed in the queue; no token was computed."""
    return Failure(Code.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED", "the deadline passed in the queue")


def request_id_in_use() -> Failure:
    """Another request with this id is in flight."""
    return Failure(
        Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "another request with this id is in flight", field="request_id"
    )


def objection(hello: WorkerHello, others: Iterable[Card]) -> Failure | None:
    """Why a worker cannot join those with these cards, if it cannot."""
    wanted = {
        "worker_id": bool(hello.worker_id),
        "address": bool(hello.address),
        "card.name": bool(hello.card.name),
        "card.block_size": hello.card.block_size > 0,
        "credits": hello.credits > 0,
        "stored_keys": len(hello.stored_keys) % KEY_BYTES == 0,
    }
    for name, present in wanted.items():
        if not present:
            return bad_hello(name)
    return model_mismatch() if any(hello.card.conflicts_with(other) for other in others) else None


def model_mismatch() -> Failure:
    """A worker says it serves a model of this name, but not the same one as the workers that do."""
    return Failure(
        Code.FAILED_PRECONDITION,
        "MODEL_MISMATCH",
        "workers of this model have another fingerprint, block size or bundle",
    )


def bad_hello(field: str) -> Failure:
    """A worker's hello misses something that cannot be done without."""
    return Failure(Code.INVALID_ARGUMENT, "INVALID_HELLO", f"{field} is missing or malformed", field=field)
