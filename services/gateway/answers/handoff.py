"""An answer that begins at one worker and continues at another: an attempt of two stages. Knows placements alone.

A handoff is a planned recovery: the second worker gets an ordinary job of prompt and tokens so far, and the name of the
first worker, from which it may fetch the blocks that it would have to compute. A handoff that fails is a lost attempt.
"""

from grpc import StatusCode

from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.gateway.links.scheduler_link import Placement

HANDED_OFF = WeftError(
    StatusCode.UNAVAILABLE, "HANDED_OFF", "the answer continues at a worker that is not known here", retryable=True
)


def second_stage(first: Placement) -> Placement | None:
    """The placement that follows the first token; None if the first one is that of the whole answer."""
    if not first.HasField("handoff"):
        return None
    to, job_id, attempt = first.handoff, first.job_id, first.attempt
    if isinstance(first, mesh.Joined):
        leader = first.leader_job_id
        return mesh.Joined(
            job_id=job_id, attempt=attempt, worker_id=to.worker_id, address=to.address, leader_job_id=leader
        )
    return mesh.Assigned(
        job_id=job_id,
        attempt=attempt,
        worker_id=to.worker_id,
        address=to.address,
        placement=to.placement,
        source=first.address,
    )
