"""An early attempt: a job sent to the only worker of its model before the scheduler has placed it. Knows no tokens.

At the worker the job is TENTATIVE: it replaces no other job of its id, no request can join it, and the scheduler gets
no report of it. None of its tokens are delivered until the scheduler places the job on this worker: then it is
CONFIRMED. Any other answer of the scheduler aborts it, and so does a scheduler that takes too long.
"""

import asyncio

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.gateway.answers.attempt import Attempt
from services.gateway.links.scheduler_link import Placement

CONFIRM_WAIT_S = 0.25
"""How long an early attempt waits for the scheduler. A scheduler with a free worker answers within 2 ms, in a burst
later; a job that has to wait in the queue must not run meanwhile."""


class EarlyAttempt:
    """A `with` block around an attempt that is not confirmed yet: aborts it at the end, unless it was confirmed."""

    def __init__(self, attempt: Attempt, address: str) -> None:
        """`address` of the worker that has the job."""
        self.attempt = attempt
        self._address = address
        self._settled = False
        self._timer = asyncio.get_running_loop().call_later(CONFIRM_WAIT_S, self._expire)

    def __enter__(self) -> "EarlyAttempt":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._settled:
            self._abort()

    def confirm(self, placement: Placement) -> bool:
        """Confirms the job if the scheduler placed it on this worker and it has not failed there; else aborts it."""
        stream = self.attempt.stream
        failed = stream.closed.done() if stream.end is None else stream.end.reason == api.FINISH_REASON_ERROR
        if failed or not isinstance(placement, mesh.Assigned) or placement.address != self._address:
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
