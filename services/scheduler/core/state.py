"""The scheduler's state: models, workers, jobs, counters, and the commands of the current event.

Each method changes all of it consistently. Pure; decides nothing.
"""

from dataclasses import dataclass, field

from services.scheduler.core.catalog import Catalog
from services.scheduler.core.commands import CommandBuffer
from services.scheduler.core.job_table import JobTable
from services.scheduler.core.messages import Failure, RunningJob, Submit
from services.scheduler.core.models import ModelRecord
from services.scheduler.core.placement import Choice
from services.scheduler.core.poison import PoisonWatch
from services.scheduler.core.reach import Reach
from services.scheduler.core.records import JobRecord, Need, WorkerRecord


@dataclass(slots=True)
class EventCounters:
    """Counts since the scheduler's start."""

    submitted: int = 0
    assigned: int = 0
    joined: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    withdrawn: int = 0
    ended: int = 0
    tokens: int = 0
    prompt_blocks: int = 0
    matched_blocks: int = 0
    workers_attached: int = 0
    workers_lost: int = 0


class State:
    """All that the scheduler stores, and the transitions of jobs and workers."""

    def __init__(self, now: float) -> None:
        self.counters = EventCounters()
        self.catalog = Catalog(now)
        self.workers: dict[str, WorkerRecord] = {}
        self.jobs = JobTable(self.catalog.by_name)
        self.commands = CommandBuffer()
        self.reach = Reach()
        self.poison = PoisonWatch()
        self.to_dispatch: dict[str, None] = {}
        """Names of models that may have both a waiting job and a free credit."""
        self._order = self._placements = 0

    @property
    def models(self) -> dict[str, ModelRecord]:
        """Models by name."""
        return self.catalog.by_name

    # ---- jobs ----

    def new_job(self, submit: Submit, gateway_id: str | None, now: float) -> JobRecord:
        """A record for a job that a gateway submitted now or, if `gateway_id` is None, that a worker reported."""
        self._order += 1
        return JobRecord(submit, gateway_id, self._order, now)

    def enqueue(self, job: JobRecord, model: ModelRecord) -> None:
        """Puts a job in the queue of its model."""
        self.jobs.add(job, model.name)
        job.need = self.need(job)
        model.queue.push(job)
        self.to_dispatch[model.name] = None

    def need(self, job: JobRecord) -> Need:
        """What a job needs of a worker now."""
        return job.need._replace(suspect=self.poison.suspect(job.submit.fingerprint))

    def assign(self, job: JobRecord, choice: Choice, model: ModelRecord, now: float, retry_after_s: float) -> None:
        """Assigns a job that was taken out of the queue to a worker, and to the one that continues it, if any.
        retry_after_s: as in the answer."""
        worker = self.workers[choice.worker_id]
        job.matched_blocks, job.source = choice.matched_blocks, choice.source
        worker.add_job(job, now)
        if choice.handoff_to:
            self.workers[choice.handoff_to].expect(job)
        worker.add_unreported(job.prompt_tokens - job.matched_blocks * worker.hello.card.block_size, now)
        model.charge(job)
        self.counters.assigned += 1
        self.counters.prompt_blocks += model.blocks(job)
        self.counters.matched_blocks += job.matched_blocks
        self.answer_assigned(job, retry_after_s)

    def hand_over(self, job: JobRecord, tokens: int, now: float) -> None:
        """Moves a running job to the worker that continues it, after `tokens` tokens at the one before."""
        worker, to = job.worker, job.handoff_to
        assert worker is not None, job
        assert to is not None, job
        worker.remove_job(job)
        to.expect_no_more(job)
        to.add_job(job, now)
        job.placement, job.produced = job.handoff_placement, job.produced + tokens
        job.matched_blocks = job.prompt_tokens // to.hello.card.block_size
        if tokens:
            self.poison.survived(job.submit.fingerprint)
        self.to_dispatch[job.model_name] = None

    def adopt(self, running: RunningJob, worker: WorkerRecord, now: float) -> None:
        """Records a job that a worker runs and no gateway has submitted to this scheduler.

        Either the scheduler was restarted, or the submission of the job's next attempt is on its way.
        """
        name = worker.hello.card.name
        job = self.new_job(Submit(running.job_id, running.attempt, model=name), None, now)
        self.jobs.add(job, name)
        worker.add_job(job, now)

    def end(self, job: JobRecord, tokens: int, now: float) -> None:
        """Records that a job ended at its worker with `tokens` new tokens."""
        self.counters.ended += 1
        if tokens:
            self.poison.survived(job.submit.fingerprint)
        tokens += job.produced
        self.counters.tokens += tokens
        self.models[job.model_name].record_end(job, tokens, now)
        self.release(job, job.prompt_tokens + tokens)

    def release(self, job: JobRecord, cost: int) -> None:
        """Takes a running job off its worker and corrects its charge to `cost` tokens."""
        assert job.worker is not None, job
        self.models[job.model_name].settle(job, cost)
        self.to_dispatch[job.model_name] = None
        job.worker.remove_job(job)
        if job.handoff_to is not None:
            job.handoff_to.expect_no_more(job)
        self.jobs.forget(job)

    def remove(self, job: JobRecord) -> list[JobRecord]:
        """Takes a job out of its queue or off its worker, free of charge; returns the followers that it leaves."""
        if job.worker is not None:
            self.release(job, 0)
            return []
        self.models[job.model_name].queue.remove(job)
        return self.jobs.forget(job)

    # ---- workers and models ----

    def remove_worker(self, worker: WorkerRecord) -> None:
        """Removes a worker that has no jobs any more. Jobs that were to continue there end where they are."""
        for job in list(worker.coming.values()):
            worker.expect_no_more(job)
        del self.workers[worker.id]
        self.models[worker.hello.card.name].remove_worker(worker)
        self.publish_models()

    def publish_models(self) -> None:
        """Sends the list of models to all gateways if it has changed."""
        if (models := self.catalog.next_list()) is not None:
            self.commands.broadcast(models)

    # ---- answers ----

    def answer_assigned(self, job: JobRecord, retry_after_s: float = 0.0) -> None:
        """Answers a job with its worker. retry_after_s: greater than 0 if the queue that it left is nearly full.

        Each such answer has a new placement number, which the job's end repeats, so an end frees the credit of no later
        answer.
        """
        self._placements += 1
        job.placement = self._placements
        if job.handoff_to is not None:
            self._placements += 1
            job.handoff_placement = self._placements
        self.commands.send_assigned(job, retry_after_s)

    def answer_joined(self, job: JobRecord, leader: JobRecord) -> None:
        """Answers a job with the running job whose tokens it shares."""
        self.counters.joined += 1
        self.commands.send_joined(job, leader)

    def reject(self, job: JobRecord, failure: Failure) -> None:
        """Answers a job with the reason why it does not run."""
        rejected = self.counters.rejected
        rejected[failure.reason] = rejected.get(failure.reason, 0) + 1
        self.commands.send_rejected(job, failure)

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Asserts what must hold between two events; for tests."""
        assert not self.to_dispatch, self.to_dispatch
        assert not self.commands, self.commands
        waiting = {job.id: job for model in self.models.values() for job in model.queue}
        running = {job.id: job for worker in self.workers.values() for job in worker.jobs.values()}
        assert self.poison.changed or all(job.need == self.need(job) for job in waiting.values()), waiting
        assert not waiting.keys() & running.keys(), waiting.keys() & running.keys()
        self.jobs.check_integrity(waiting | running)
        for worker in self.workers.values():
            model = self.models[worker.hello.card.name]
            assert model.workers[worker.id] is worker, worker
            assert all(job.worker is worker for job in worker.jobs.values()), worker
            assert all(job.handoff_to is worker and job.worker is not None for job in worker.coming.values()), worker
        assert sum(len(model.workers) for model in self.models.values()) == len(self.workers)
