"""A head start: a job that goes to where it will surely run while the scheduler still decides. Knows rows, no tokens.

The scheduler's answer alone counts. Until it comes, nothing of the job is told, and at the worker nobody else knows of
it: another of the same id, a client's earlier try at another gateway, runs on. An answer that names another worker or
job, refuses this one or lets it wait takes the head start back.
"""

import asyncio

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import telemetry
from services.gateway.links.worker_link import JobStream

PATIENCE_S = 0.25
"""A scheduler that has a worker for a job says so within a millisecond or two, in a burst later; a job that has to wait
runs nowhere."""


class HeadStart:
    """A job on its way to a worker that nobody has named yet. As a context manager it is taken back at the end of its
    block, unless it was confirmed."""

    def __init__(self, address: str, row: JobStream, span: telemetry.Span) -> None:
        self.row = row
        self.span = span
        self._address = address
        self._settled = False
        self._late = asyncio.get_running_loop().call_later(PATIENCE_S, self._withdraw)

    def __enter__(self) -> "HeadStart":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._settled:
            self._take_back()

    def confirmed(self, placement: mesh.Assigned | mesh.Joined) -> bool:
        """Whether the job was assigned to this worker, and has not failed there; if not, it is taken back."""
        end = self.row.end
        lives = not self.row.closed.done() if end is None else end.reason != api.FINISH_REASON_ERROR
        if not (lives and isinstance(placement, mesh.Assigned) and placement.address == self._address):
            self._take_back()
            return False
        self._settled = True
        self._late.cancel()
        self.row.worker_id = placement.worker_id
        self.row.link.confirm(self.row, placement.placement)
        return True

    def _take_back(self) -> None:
        """The job does not run there after all."""
        self._settled = True
        self._late.cancel()
        self.row.link.take_back(self.row)
        self.span.set({"weft.cancelled": True})
        self.span.end()

    def _withdraw(self) -> None:
        self.row.link.cancel(self.row, 0)
