"""Why the scheduler refuses a job or a worker: one function per reason. Pure; decides about workers' hellos alone."""

from collections.abc import Iterable

from services.hashing import KEY_BYTES
from services.scheduler.core.messages import Card, Code, Failure, WorkerHello

# ---- jobs ----


def model_not_found() -> Failure:
    """No worker serves this model, and none did within the time that a model is remembered."""
    return Failure(Code.NOT_FOUND, "MODEL_NOT_FOUND", "no such model is served", field="model")


def no_worker(retry_after_s: float) -> Failure:
    """The model is known, but no healthy worker serves it now."""
    return Failure(Code.UNAVAILABLE, "NO_WORKER", "no healthy worker serves this model now", retry_after_s)


def queue_full(retry_after_s: float) -> Failure:
    """The queue of the model is full."""
    return Failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue of this model is full", retry_after_s)


def shed(retry_after_s: float) -> Failure:
    """The job may be shed, and would have to wait."""
    return Failure(Code.RESOURCE_EXHAUSTED, "SHED", "the mesh is busy, and the request is sheddable", retry_after_s)


def deadline_unmeetable(retry_after_s: float) -> Failure:
    """The answer is expected to end after the deadline."""
    message = "the answer is not expected to end before the deadline"
    return Failure(Code.DEADLINE_EXCEEDED, "DEADLINE_UNMEETABLE", message, retry_after_s)


def deadline_expired() -> Failure:
    """The deadline passed while the job waited; no token was computed."""
    return Failure(Code.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED", "the deadline passed in the queue")


def poisoned() -> Failure:
    """Workers died under this request, the last one while no other suspect ran there."""
    return Failure(Code.INTERNAL, "POISONED", "this request ended the workers that computed it, and is refused")


def request_id_in_use() -> Failure:
    """Another request with this id is in flight."""
    return Failure(
        Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "another request with this id is in flight", field="request_id"
    )


# ---- workers ----


def hello_error(hello: WorkerHello, others: Iterable[Card]) -> Failure | None:
    """Why a worker cannot register beside workers with the cards `others`; None if it can."""
    present = {
        "worker_id": bool(hello.worker_id),
        "address": bool(hello.address),
        "card.name": bool(hello.card.name),
        "card.block_size": hello.card.block_size > 0,
        "credits": hello.credits > 0,
        "stored_keys": len(hello.stored_keys) % KEY_BYTES == 0,
    }
    for name, valid in present.items():
        if not valid:
            return invalid_hello(name)
    return model_mismatch() if any(hello.card.conflicts_with(other) for other in others) else None


def model_mismatch() -> Failure:
    """A worker registers a model under a name that other workers use for a different model."""
    return Failure(
        Code.FAILED_PRECONDITION,
        "MODEL_MISMATCH",
        "workers of this model have another fingerprint, block size or bundle",
    )


def invalid_hello(field: str) -> Failure:
    """A required field of a worker's hello is missing or malformed."""
    return Failure(Code.INVALID_ARGUMENT, "INVALID_HELLO", f"{field} is missing or malformed", field=field)
