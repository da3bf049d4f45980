"""Who listens to a worker's jobs: a job ends with its last listener, also one that had to wait for it."""

from typing import Any

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.worker.job import Cost, Ended, EndReason, Job, StepOutput
from services.worker.jobs import Jobs, Listener
from services.worker.metrics import WorkerMetrics


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


def job(row: int, placement: int = 0) -> mesh.Job:
    sampling = api.Sampling(max_tokens=9, seed=1)
    return mesh.Job(
        row=row, job_id="j", attempt=1, token_ids=[5, 6], boundary=2, sampling=sampling, placement=placement
    )


@pytest.mark.parametrize("leaves", [False, True], ids=["cancels", "breaks"])
async def test_a_job_does_not_run_for_one_who_left_before_it_came(leaves: bool) -> None:
    engine = Noting()
    jobs = Jobs(engine, CARD, 0.0, WorkerMetrics())
    early, leader = Listener("early"), Listener("leader")
    jobs.attach(early, ATTACH)
    if leaves:
        jobs.leave(early)
    else:
        jobs.cancel(early, mesh.CancelJob(row=9))
    jobs.start(leader, job(row=1))
    jobs.cancel(leader, mesh.CancelJob(row=1))
    assert engine.cancelled == engine.submitted


async def test_a_job_runs_on_for_one_who_waited_for_it() -> None:
    engine: Any = Noting()
    jobs = Jobs(engine, CARD, 0.0, WorkerMetrics())
    early, leader = Listener("early"), Listener("leader")
    jobs.attach(early, mesh.AttachJob(row=8, job_id="j"))
    jobs.attach(early, ATTACH)
    jobs.cancel(early, mesh.CancelJob(row=9))
    jobs.start(leader, job(row=1))
    jobs.cancel(leader, mesh.CancelJob(row=1))
    assert engine.cancelled == []
    jobs.cancel(early, mesh.CancelJob(row=8))
    assert engine.cancelled == engine.submitted


async def test_of_two_jobs_of_one_name_each_end_says_which_it_is_of() -> None:
    engine = Noting()
    jobs = Jobs(engine, CARD, 0.0, WorkerMetrics())
    gateway = Listener("gateway")
    jobs.start(gateway, job(row=1, placement=4))
    jobs.cancel(gateway, mesh.CancelJob(row=1))
    jobs.start(gateway, job(row=2, placement=5))
    ends = [Ended(key, EndReason.CANCELLED, 0, Cost()) for key in engine.submitted]
    jobs.deliver(StepOutput([], ends))
    assert [end.placement for end in jobs.take_ended()] == [4, 5]
