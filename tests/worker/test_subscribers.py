"""Subscribers of a worker's jobs: a job ends with its last one, also if that one waited for the job to arrive."""

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.worker.job import Cost, Ended, EndReason, Job, StepOutput, TokenOut
from services.worker.service.job_record import Subscriber
from services.worker.service.jobs import Jobs
from services.worker.service.metrics import WorkerMetrics


class RecordingEngine:
    """An engine that records its calls."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.cancelled: list[int] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job.key)

    def cancel(self, key: int, position: int) -> None:
        self.cancelled.append(key)


CARD = mesh.ModelCard(name="m", context_length=64, vocab_size=100)
ATTACH = mesh.AttachJob(stream_id=9, job_id="j")


def job(stream_id: int, placement: int = 1, tentative: bool = False) -> mesh.Job:
    """A job; a tentative one has no placement."""
    return mesh.Job(
        stream_id=stream_id,
        job_id="j",
        attempt=1,
        token_ids=[5, 6],
        prompt_len=2,
        sampling=api.Sampling(max_tokens=9, seed=1),
        placement=0 if tentative else placement,
        tentative=tentative,
    )


def closed(link: Subscriber) -> Subscriber:
    """Ends the link, so that iterating it ends."""
    link.close()
    return link


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def jobs(engine: RecordingEngine) -> Jobs:
    return Jobs(engine, CARD, 0.0, WorkerMetrics())


@pytest.mark.parametrize("leaves", [False, True], ids=["cancels", "breaks"])
async def test_a_job_does_not_run_for_a_subscriber_that_left_before(
    engine: RecordingEngine, jobs: Jobs, leaves: bool
) -> None:
    early, leader = Subscriber("early"), Subscriber("leader")
    jobs.attach(early, ATTACH)
    if leaves:
        jobs.leave(early)
    else:
        jobs.cancel(early, mesh.CancelJob(stream_id=9))
    jobs.start(leader, job(stream_id=1))
    jobs.cancel(leader, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == engine.submitted


async def test_a_job_runs_on_for_a_subscriber_that_waited_for_it(engine: RecordingEngine, jobs: Jobs) -> None:
    early, leader = Subscriber("early"), Subscriber("leader")
    jobs.attach(early, mesh.AttachJob(stream_id=8, job_id="j"))
    jobs.attach(early, ATTACH)
    jobs.cancel(early, mesh.CancelJob(stream_id=9))
    jobs.start(leader, job(stream_id=1))
    jobs.cancel(leader, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == []
    jobs.cancel(early, mesh.CancelJob(stream_id=8))
    assert engine.cancelled == engine.submitted


async def test_the_ends_of_two_jobs_with_one_id_carry_their_placements(engine: RecordingEngine, jobs: Jobs) -> None:
    gateway = Subscriber("gateway")
    jobs.start(gateway, job(stream_id=1, placement=4))
    jobs.cancel(gateway, mesh.CancelJob(stream_id=1))
    jobs.start(gateway, job(stream_id=2, placement=5))
    ends = [Ended(key, EndReason.CANCELLED, 0, Cost()) for key in engine.submitted]
    jobs.deliver(StepOutput([], ends))
    assert [end.placement for end in jobs.take_ended()] == [4, 5]


async def test_a_tentative_job_replaces_no_job_and_is_not_reported(engine: RecordingEngine, jobs: Jobs) -> None:
    owner, early, follower = Subscriber("owner"), Subscriber("early"), Subscriber("follower")
    jobs.start(owner, job(stream_id=1, placement=4))
    jobs.start(early, job(stream_id=1, tentative=True))
    assert engine.cancelled == []  # The confirmed job with the same id runs on,
    assert [running.job_id for running in jobs.running()] == ["j"]  # and is the one reported to the scheduler.
    jobs.attach(follower, ATTACH)
    first, second = engine.submitted
    jobs.deliver(StepOutput([TokenOut(first, 0, 50), TokenOut(second, 0, 60)], []))
    jobs.cancel(early, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == [second]
    jobs.deliver(StepOutput([], [Ended(second, EndReason.CANCELLED, 1, Cost())]))
    assert jobs.take_ended() == []  # It held no credit.
    jobs.deliver(StepOutput([], [Ended(first, EndReason.LENGTH, 1, Cost())]))
    assert [end.placement for end in jobs.take_ended()] == [4]
    assert [list(message.token_ids) async for message in closed(follower)] == [[50]]


async def test_a_job_that_is_confirmed_is_joined_by_waiting_subscribers(engine: RecordingEngine, jobs: Jobs) -> None:
    owner, early, follower = Subscriber("owner"), Subscriber("early"), Subscriber("follower")
    jobs.start(early, job(stream_id=1, tentative=True))
    first = engine.submitted[0]
    jobs.deliver(StepOutput([TokenOut(first, 0, 50)], []))
    jobs.attach(follower, ATTACH)
    assert jobs.running() == []
    jobs.confirm(early, mesh.ConfirmJob(stream_id=1, placement=5))
    assert len(jobs.running()) == 1
    jobs.start(owner, job(stream_id=1, placement=6))
    assert engine.cancelled == [first]
    [message] = [message async for message in closed(follower)]
    assert (list(message.token_ids), message.ends[0].failure.reason) == ([50], "ATTEMPT_REPLACED")


async def test_a_job_that_ended_before_it_was_confirmed_is_retired(engine: RecordingEngine, jobs: Jobs) -> None:
    early, follower = Subscriber("early"), Subscriber("follower")
    jobs.start(early, job(stream_id=1, tentative=True))
    [key] = engine.submitted
    jobs.deliver(StepOutput([TokenOut(key, 0, 50)], [Ended(key, EndReason.LENGTH, 1, Cost())]))
    assert jobs.take_ended() == []
    jobs.confirm(early, mesh.ConfirmJob(stream_id=1, placement=5))
    assert [(end.placement, end.tokens) for end in jobs.take_ended()] == [(5, 1)]
    jobs.attach(follower, ATTACH)
    [message] = [message async for message in closed(follower)]
    assert (list(message.token_ids), message.ends[0].reason) == ([50], api.FINISH_REASON_LENGTH)
    assert not early.streams


@pytest.mark.parametrize("ended", [False, True])
async def test_a_tentative_job_ends_with_its_link(engine: RecordingEngine, jobs: Jobs, ended: bool) -> None:
    early = Subscriber("early")
    jobs.start(early, job(stream_id=1, tentative=True))
    [key] = engine.submitted
    if ended:
        jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 0, Cost())]))
    jobs.leave(early)
    assert engine.cancelled == ([] if ended else [key])
    assert jobs.take_ended() == []


async def test_a_tentative_job_that_ended_and_is_cancelled_is_forgotten(engine: RecordingEngine, jobs: Jobs) -> None:
    early = Subscriber("early")
    jobs.start(early, job(stream_id=1, tentative=True))
    [key] = engine.submitted
    jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 0, Cost())]))
    jobs.cancel(early, mesh.CancelJob(stream_id=1, position=0))
    assert (engine.cancelled, early.streams, jobs.take_ended()) == ([], {}, [])


async def test_the_refusal_of_a_tentative_job_is_not_reported(engine: RecordingEngine, jobs: Jobs) -> None:
    early = Subscriber("early")
    jobs.draining = True
    jobs.start(early, job(stream_id=1, tentative=True))
    assert (engine.submitted, jobs.take_ended()) == ([], [])
    jobs.start(early, job(stream_id=2, placement=3))
    assert [end.placement for end in jobs.take_ended()] == [3]


async def test_several_tokens_of_a_step_are_sent_in_order(engine: RecordingEngine, jobs: Jobs) -> None:
    link = Subscriber("owner")
    jobs.start(link, job(stream_id=1))
    (key,) = engine.submitted
    jobs.deliver(StepOutput([TokenOut(key, position, 50 + position) for position in range(3)], []))
    messages = [message async for message in closed(link)]
    assert [token for message in messages for token in message.token_ids] == [50, 51, 52]
