"""An early attempt: a job sent to the only worker of its model before the scheduler has placed it. Knows no tokens.

At the worker the job is TENTATIVE: it replaces no other job of its id, no request can join it, and the scheduler gets
no report of it. None of its tokens are delivered until the scheduler places the job on this worker: then it is
CONFIRMED. Any other answer of the scheduler aborts it, and so does a scheduler that takes too long.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import telemetry
from services.gateway.backend import Backend
from services.gateway.links.adapters import Served
from services.gateway.links.scheduler_link import Placement
from services.gateway.links.worker_link import JobStream, WorkerLink

CONFIRM_WAIT_S = 0.25
"""How long an early attempt waits for the scheduler. A scheduler with a free worker answers within 2 ms, in a burst
later; a job that has to wait in the queue must not run meanwhile."""


class OpenAttempt(Protocol):
    """An attempt whose job a worker has received."""

    @property
    def stream(self) -> JobStream:
        """The job's stream."""

    @property
    def span(self) -> telemetry.Span:
        """The attempt's span."""


Opened = TypeVar("Opened", bound=OpenAttempt)


def early_link(backend: Backend, served: Served, fingerprint: Callable[[], bytes]) -> WorkerLink | None:
    """The link for an early attempt. None where the model has several workers or this gateway runs a job at its only
    one: the scheduler may choose another place, or the job would have to wait. None for suspects, which `fingerprint`
    identifies: they are placed by the scheduler alone."""
    if not served.only_address:
        return None
    link, suspects = backend.workers.to(served.only_address), backend.scheduler.suspects
    if not link.idle or not link.usable or (suspects and fingerprint() in suspects):
        return None
    return link


class EarlyAttempt(Generic[Opened]):
    """A `with` block around an attempt that is not confirmed yet: aborts it at the end, unless it was confirmed."""

    def __init__(self, attempt: Opened) -> None:
        self.attempt = attempt
        self._settled = False
        self._timer = asyncio.get_running_loop().call_later(CONFIRM_WAIT_S, self._expire)

    def __enter__(self) -> "EarlyAttempt[Opened]":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._settled:
            self._abort()

    def confirm(self, placement: Placement) -> bool:
        """Confirms the job if the scheduler placed it on this worker and it has not failed there; else aborts it."""
        stream = self.attempt.stream
        failed = stream.closed.done() if stream.end is None else stream.end.reason == api.FINISH_REASON_ERROR
        if failed or not isinstance(placement, mesh.Assigned) or placement.address != stream.link.address:
            self._abort()
            return False
        self._settled = True
        self._timer.cancel()
        stream.worker_id = placement.worker_id
        stream.link.confirm(stream, placement.placement)
        return True

    def _abort(self) -> None:
        self._settled = True
        self._timer.cancel()
        self.attempt.stream.link.abort(self.attempt.stream)
        self.attempt.span.set({"weft.cancelled": True})
        self.attempt.span.end()

    def _expire(self) -> None:
        self.attempt.stream.link.cancel(self.attempt.stream, 0)
