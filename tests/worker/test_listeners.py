"""Who listens to a worker's jobs: a job ends with its last listener, also one that had to wait for it."""

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.worker.job import Cost, Ended, EndReason, Job, StepOutput, TokenOut
from services.worker.service.jobs import Jobs, Listener
from services.worker.service.metrics import WorkerMetrics


class Noting:
    """An engine that notes what it is told."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.cancelled: list[int] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job.key)

    def cancel(self, key: int, position: int) -> None:
        self.cancelled.append(key)


CARD = mesh.ModelCard(name="m", context_length=64, vocab_size=100)
ATTACH = mesh.AttachJob(row=9, job_id="j")


def job(row: int, placement: int = 1) -> mesh.Job:
    sampling = api.Sampling(max_tokens=9, seed=1)
    return mesh.Job(
        row=row, job_id="j", attempt=1, token_ids=[5, 6], boundary=2, sampling=sampling, placement=placement
    )


def closed(link: Listener) -> Listener:
    """What it has to write is all that it will have."""
    link.close()
    return link


@pytest.fixture
def engine() -> Noting:
    return Noting()


@pytest.fixture
def jobs(engine: Noting) -> Jobs:
    return Jobs(engine, CARD, 0.0, WorkerMetrics())


@pytest.mark.parametrize("leaves", [False, True], ids=["cancels", "breaks"])
async def test_a_job_does_not_run_for_one_who_left_before_it_came(engine: Noting, jobs: Jobs, leaves: bool) -> None:
    early, leader = Listener("early"), Listener("leader")
    jobs.attach(early, ATTACH)
    if leaves:
        jobs.leave(early)
    else:
        jobs.cancel(early, mesh.CancelJob(row=9))
    jobs.start(leader, job(row=1))
    jobs.cancel(leader, mesh.CancelJob(row=1))
    assert engine.cancelled == engine.submitted


async def test_a_job_runs_on_for_one_who_waited_for_it(engine: Noting, jobs: Jobs) -> None:
    early, leader = Listener("early"), Listener("leader")
    jobs.attach(early, mesh.AttachJob(row=8, job_id="j"))
    jobs.attach(early, ATTACH)
    jobs.cancel(early, mesh.CancelJob(row=9))
    jobs.start(leader, job(row=1))
    jobs.cancel(leader, mesh.CancelJob(row=1))
    assert engine.cancelled == []
    jobs.cancel(early, mesh.CancelJob(row=8))
    assert engine.cancelled == engine.submitted


async def test_of_two_jobs_of_one_name_each_end_says_which_it_is_of(engine: Noting, jobs: Jobs) -> None:
    gateway = Listener("gateway")
    jobs.start(gateway, job(row=1, placement=4))
    jobs.cancel(gateway, mesh.CancelJob(row=1))
    jobs.start(gateway, job(row=2, placement=5))
    ends = [Ended(key, EndReason.CANCELLED, 0, Cost()) for key in engine.submitted]
    jobs.deliver(StepOutput([], ends))
    assert [end.placement for end in jobs.take_ended()] == [4, 5]


async def test_a_job_that_was_sent_ahead_is_nobodys_until_it_is_confirmed(engine: Noting, jobs: Jobs) -> None:
    owner, early, follower = Listener("owner"), Listener("early"), Listener("follower")
    jobs.start(owner, job(row=1, placement=4))
    jobs.start(early, job(row=1, placement=0))
    assert engine.cancelled == []  # The other of its id runs on,
    assert [running.job_id for running in jobs.running()] == ["j"]  # and is the one that the scheduler hears of.
    jobs.attach(follower, ATTACH)
    first, second = engine.submitted
    jobs.deliver(StepOutput([TokenOut(first, 0, 50), TokenOut(second, 0, 60)], []))
    jobs.cancel(early, mesh.CancelJob(row=1))
    assert engine.cancelled == [second]
    jobs.deliver(StepOutput([], [Ended(second, EndReason.CANCELLED, 1, Cost())]))
    assert jobs.take_ended() == []  # It had no credit.
    jobs.deliver(StepOutput([], [Ended(first, EndReason.LENGTH, 1, Cost())]))
    assert [end.placement for end in jobs.take_ended()] == [4]
    assert [list(message.token_ids) async for message in closed(follower)] == [[50]]


async def test_a_confirmed_job_takes_the_place_of_an_older_one_and_tells_who_waits(engine: Noting, jobs: Jobs) -> None:
    owner, early, follower = Listener("owner"), Listener("early"), Listener("follower")
    jobs.start(early, job(row=1, placement=0))
    first = engine.submitted[0]
    jobs.deliver(StepOutput([TokenOut(first, 0, 50)], []))
    jobs.attach(follower, ATTACH)
    assert jobs.running() == []
    jobs.confirm(early, mesh.ConfirmJob(row=1, placement=5))
    assert len(jobs.running()) == 1
    jobs.start(owner, job(row=1, placement=6))
    assert engine.cancelled == [first]
    [message] = [message async for message in closed(follower)]
    assert (list(message.token_ids), message.ends[0].failure.reason) == ([50], "ATTEMPT_REPLACED")


async def test_a_job_that_ended_before_it_was_confirmed_is_as_any_other(engine: Noting, jobs: Jobs) -> None:
    early, follower = Listener("early"), Listener("follower")
    jobs.start(early, job(row=1, placement=0))
    [key] = engine.submitted
    jobs.deliver(StepOutput([TokenOut(key, 0, 50)], [Ended(key, EndReason.LENGTH, 1, Cost())]))
    assert jobs.take_ended() == []
    jobs.confirm(early, mesh.ConfirmJob(row=1, placement=5))
    assert [(end.placement, end.tokens) for end in jobs.take_ended()] == [(5, 1)]
    jobs.attach(follower, ATTACH)
    [message] = [message async for message in closed(follower)]
    assert (list(message.token_ids), message.ends[0].reason) == ([50], api.FINISH_REASON_LENGTH)
    assert not early.rows


@pytest.mark.parametrize("ended", [False, True])
async def test_a_job_that_nobody_confirms_ends_with_its_link(engine: Noting, jobs: Jobs, ended: bool) -> None:
    early = Listener("early")
    jobs.start(early, job(row=1, placement=0))
    [key] = engine.submitted
    if ended:
        jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 0, Cost())]))
    jobs.leave(early)
    assert engine.cancelled == ([] if ended else [key])
    assert jobs.take_ended() == []


async def test_a_job_that_ended_and_is_taken_back_is_forgotten(engine: Noting, jobs: Jobs) -> None:
    early = Listener("early")
    jobs.start(early, job(row=1, placement=0))
    [key] = engine.submitted
    jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 0, Cost())]))
    jobs.cancel(early, mesh.CancelJob(row=1, position=0))
    assert (engine.cancelled, early.rows, jobs.take_ended()) == ([], {}, [])


async def test_a_job_that_was_sent_ahead_and_refused_had_no_credit(engine: Noting, jobs: Jobs) -> None:
    early = Listener("early")
    jobs.draining = True
    jobs.start(early, job(row=1, placement=0))
    assert (engine.submitted, jobs.take_ended()) == ([], [])
    jobs.start(early, job(row=2, placement=3))
    assert [end.placement for end in jobs.take_ended()] == [3]
