"""What the pool has written down: models, workers and jobs, what is counted, what is to be said.

Each change leaves all of it in agreement. Pure; decides nothing.
"""

from services.scheduler.core.catalog import Catalog
from services.scheduler.core.commands import Commands
from services.scheduler.core.jobs import Jobs
from services.scheduler.messages import Counters, Failure, JobRef, Submit
from services.scheduler.models import Model
from services.scheduler.workers import Job, Worker


class State:
    """The state of the mesh, and the ways that jobs and workers go through it."""

    def __init__(self, now: float) -> None:
        self.counters = Counters()
        self.catalog = Catalog(now)
        self.workers: dict[str, Worker] = {}
        self.jobs = Jobs(self.catalog.by_name)
        self.out = Commands()
        self.changed: dict[str, None] = {}
        """Models that may have a job for a credit, by name."""
        self._order = self._placements = 0

    @property
    def models(self) -> dict[str, Model]:
        """By name."""
        return self.catalog.by_name

    # ---- jobs ----

    def new_job(self, submit: Submit, gateway_id: str | None, now: float) -> Job:
        """A job that came just now, from this gateway or (None) from a worker."""
        self._order += 1
        return Job(submit, gateway_id, self._order, now)

    def line_up(self, job: Job, model: Model) -> None:
        """A job waits in the line of its model."""
        self.jobs.add(job, model.name)
        model.line.push(job)
        self.changed[model.name] = None

    def assign(self, job: Job, worker: Worker, model: Model, now: float) -> None:
        """A job that was taken out of the line runs."""
        worker.take(job, now)
        worker.expect(job.prompt_tokens - job.matched_blocks * worker.hello.card.block_size, now)
        model.charge(job)
        self.counters.assigned += 1
        self.counters.prompt_blocks += model.blocks(job)
        self.counters.matched_blocks += job.matched_blocks
        self.tell_assigned(job)

    def adopt(self, ref: JobRef, worker: Worker, now: float) -> None:
        """A worker runs a job that we do not know: we were restarted, or its next attempt is yet to be submitted."""
        name = worker.hello.card.name
        job = self.new_job(Submit(ref.job_id, ref.attempt, model=name), None, now)
        self.jobs.add(job, name)
        worker.take(job, now)

    def end(self, job: Job, tokens: int) -> None:
        """A job's worker runs it no more."""
        self.counters.ended += 1
        self.counters.tokens += tokens
        self.models[job.model_name].learn(tokens)
        self.release(job, job.prompt_tokens + tokens)

    def release(self, job: Job, cost: int) -> None:
        """A running job gives back its credit and what it was charged beyond `cost` tokens."""
        assert job.worker is not None, job
        self.models[job.model_name].settle(job, cost)
        self.changed[job.model_name] = None
        job.worker.release(job)
        self.jobs.forget(job)

    def remove(self, job: Job) -> list[Job]:
        """Takes a job out of the line or the books, free of charge; returns the followers that it leaves behind."""
        if job.worker is not None:
            self.release(job, 0)
            return []
        self.models[job.model_name].line.remove(job)
        return self.jobs.forget(job)

    # ---- workers and models ----

    def take_out(self, worker: Worker) -> None:
        """A worker is gone; its jobs are not on it any more."""
        del self.workers[worker.id]
        self.models[worker.hello.card.name].leave(worker)
        self.models_changed()

    def models_changed(self) -> None:
        """Tells all gateways what is served, if that is news."""
        if (news := self.catalog.news()) is not None:
            self.out.broadcast(news)

    # ---- answers ----

    def tell_assigned(self, job: Job) -> None:
        """A job's gateway hears where it runs. Each answer has a number, which the job's end repeats: it frees the
        credit of no later answer."""
        self._placements += 1
        job.placement = self._placements
        self.out.assigned(job)

    def tell_joined(self, job: Job, leader: Job) -> None:
        """A job's gateway hears whose tokens it shares."""
        self.counters.joined += 1
        self.out.joined(job, leader)

    def reject(self, job: Job, failure: Failure) -> None:
        """A job's gateway hears why it does not run."""
        rejected = self.counters.rejected
        rejected[failure.reason] = rejected.get(failure.reason, 0) + 1
        self.out.rejected(job, failure)

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Asserts what must hold between any two events; for tests."""
        waiting = {job.id: job for model in self.models.values() for job in model.line}
        running = {job.id: job for worker in self.workers.values() for job in worker.jobs.values()}
        assert not waiting.keys() & running.keys(), waiting.keys() & running.keys()
        self.jobs.check_integrity(waiting | running)
        for worker in self.workers.values():
            model = self.models[worker.hello.card.name]
            assert model.workers[worker.id] is worker, worker
            assert all(job.worker is worker for job in worker.jobs.values()), worker
        assert sum(len(model.workers) for model in self.models.values()) == len(self.workers)
