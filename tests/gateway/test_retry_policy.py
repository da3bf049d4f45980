"""The retry policy: whether a lost attempt is repeated, and under which conditions."""

from grpc import StatusCode

from protos import mesh_pb2 as mesh
from services.errors import WeftError, unavailable
from services.gateway.answers.retry_policy import RetryPolicy, RetryState
from services.gateway.links.worker_link import worker_lost

POLICY = RetryPolicy(max_attempts=4)
ASSIGNED = mesh.Assigned(worker_id="w")
JOINED = mesh.Joined(worker_id="w", leader_job_id="leader")
DRAINING = unavailable("DRAINING", "leaving")
GONE = unavailable("JOB_NOT_FOUND", "gone")
LATE = WeftError(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "late", retryable=True)


def follow(*losses: tuple[WeftError, mesh.Assigned | mesh.Joined]) -> RetryState | None:
    """The state after these losses."""
    state: RetryState | None = RetryState()
    for loss, placement in losses:
        assert state is not None
        state = POLICY.next(state, loss, placement)
    return state


def test_the_first_attempt_may_go_anywhere() -> None:
    assert RetryState() == RetryState(losses=0, failed_joins=0, avoid=(), unjoinable="")
    assert RetryState().may_join


def test_a_failure_that_is_not_retryable_ends_the_answer() -> None:
    assert follow((WeftError(StatusCode.INTERNAL, "NUMERIC", "not a number"), ASSIGNED)) is None


def test_attempts_are_bounded() -> None:
    assert follow(*[(DRAINING, ASSIGNED)] * 3) is not None
    assert follow(*[(DRAINING, ASSIGNED)] * 4) is None
    assert RetryPolicy(1).next(RetryState(), DRAINING, ASSIGNED) is None


def test_a_worker_that_failed_the_job_is_avoided() -> None:
    for loss in (DRAINING, worker_lost()):
        assert follow((loss, ASSIGNED)) == RetryState(losses=1, avoid=("w",))
    twice = follow((DRAINING, ASSIGNED), (DRAINING, mesh.Assigned(worker_id="v")))
    assert twice is not None
    assert twice.avoid == ("w", "v")


def test_an_expired_deadline_is_not_the_workers_fault() -> None:
    assert follow((LATE, ASSIGNED)) == RetryState(losses=1)


def test_a_generation_that_is_gone_is_not_joined_again() -> None:
    assert follow((GONE, JOINED)) == RetryState(losses=1, failed_joins=1, unjoinable="leader")


def test_after_two_failed_joins_the_job_runs_on_its_own() -> None:
    other = mesh.Joined(worker_id="w", leader_job_id="other")
    once, twice = follow((GONE, JOINED)), follow((GONE, JOINED), (GONE, other))
    assert once is not None
    assert twice is not None
    assert (once.may_join, twice.may_join) == (True, False)
    assert twice.unjoinable == "other"
    assert twice.avoid == ()


def test_the_loss_of_a_joined_worker_is_no_failed_join() -> None:
    """All that shared the lost generation share the next one."""
    state = follow((worker_lost(), JOINED))
    assert state == RetryState(losses=1, avoid=("w",))
    assert state.may_join
