"""What follows a lost attempt: another one, under which conditions, or none. Pure; knows no clock and no network."""

from dataclasses import dataclass, replace

from grpc import StatusCode

from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.gateway.links.scheduler_link import Placement
from services.gateway.links.worker_link import WORKER_LOST

_MOST_FAILED_JOINS = 1


@dataclass(frozen=True, slots=True)
class RetryState:
    """What the attempts of one continuation have shown so far: the conditions of the next one."""

    losses: int = 0
    """Attempts that were lost."""
    failed_joins: int = 0
    """Attempts to join a generation that was gone."""
    avoid: tuple[str, ...] = ()
    """Ids of workers that lost or failed an attempt."""
    lost_on: str = ""
    """The worker whose connection broke under the last attempt; empty if that ended otherwise."""
    lost_after: int = 0
    """Tokens that this attempt had produced."""
    unjoinable: str = ""
    """The last job that could not be joined."""

    @property
    def may_join(self) -> bool:
        """The next attempt may join another generation. After two failed joins it runs as a job of its own."""
        return self.failed_joins <= _MOST_FAILED_JOINS


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides whether an attempt is repeated, and where."""

    max_attempts: int

    def next(self, state: RetryState, loss: WeftError, placement: Placement) -> RetryState | None:
        """The conditions of the next attempt after the one at `placement` was lost; None if there is to be none."""
        losses = state.losses + 1
        if not loss.retryable or losses >= self.max_attempts:
            return None
        state = replace(state, losses=losses)
        worker_lost = loss.reason == WORKER_LOST
        if isinstance(placement, mesh.Joined) and not worker_lost:
            state = replace(state, failed_joins=state.failed_joins + 1, unjoinable=placement.leader_job_id)
        # An expired deadline is no fault of the worker, nor is a generation that is gone.
        failed = isinstance(placement, mesh.Assigned) and loss.code is not StatusCode.DEADLINE_EXCEEDED
        if worker_lost or failed:
            state = replace(state, avoid=(*state.avoid, placement.worker_id))
        return state
