"""Workers that register, report, disappear or come back, and the models that they serve. Pure; assigns no job."""

from services.scheduler.core import refusals
from services.scheduler.core.admission import Admission
from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import (
    Card,
    DropWorker,
    EndedJob,
    Refused,
    SchedulerHello,
    ToWorker,
    WorkerHello,
    WorkerLost,
    WorkerReport,
)
from services.scheduler.core.models import ModelRecord
from services.scheduler.core.records import JobRecord, WorkerRecord
from services.scheduler.core.state import State


class Membership:
    """Decides which workers and models belong to the mesh."""

    def __init__(self, state: State, admission: Admission, limits: Limits) -> None:
        self._state, self._admission, self._limits = state, admission, limits

    # ---- one worker ----

    def register(self, hello: WorkerHello, epoch: int, now: float) -> None:
        """Adds a worker, or refuses it. A worker that registers again keeps the jobs that it still runs."""
        state = self._state
        known = state.models.get(hello.card.name)
        others = [worker for worker in known.workers.values() if worker.id != hello.worker_id] if known else []
        failure = refusals.hello_error(hello, [worker.hello.card for worker in others])
        if failure is not None:
            state.commands.add(ToWorker(hello.worker_id, Refused(failure)))
            return
        state.counters.workers_attached += 1
        state.poison.alive(hello.worker_id)
        model = self._model_for(hello.card, now)
        worker = WorkerRecord(hello, now, self._limits.stall_s)
        self._take_over_jobs(worker, state.workers.get(worker.id), now)
        state.workers[worker.id] = worker
        state.catalog.end_loading(worker.id)
        model.add_worker(worker, now)
        state.commands.add(ToWorker(worker.id, SchedulerHello(epoch)))
        state.publish_models()
        state.to_dispatch[model.name] = None

    def _take_over_jobs(self, worker: WorkerRecord, old: WorkerRecord | None, now: float) -> None:
        """Moves the jobs that a worker reports as running to its new record; its other earlier jobs have ended."""
        suspect = old.probation if old is not None else None
        for running in worker.hello.running:
            job = self._state.jobs.get(running.job_id)
            if job is not None and job.worker is not None and job.worker is old and job.attempt == running.attempt:
                old.remove_job(job)
                worker.add_job(job, job.assigned_at)
            elif job is None or (job.worker is not None and job.attempt < running.attempt):
                if job is not None:
                    self._state.remove(job)
                self._state.adopt(running, worker, now)
        if old is not None:
            for job in list(old.jobs.values()):
                if job.handoff_to is not None:
                    self._state.hand_over(job, 0, now)
                else:
                    self._state.release(job, job.prompt_tokens)
            for job in list(old.coming.values()):
                old.expect_no_more(job)
                worker.expect(job)
            self._state.models[old.hello.card.name].remove_worker(old)
        if suspect is not None and suspect.worker is worker:
            worker.probation = suspect

    def update(self, worker: WorkerRecord, report: WorkerReport, now: float) -> None:
        """Applies a worker's report: its progress, its cached blocks, and the jobs that ended or never arrived."""
        worker.update(report, now)
        self._state.poison.reported(worker.id, now)
        model = self._state.models[worker.hello.card.name]
        model.index.remove(worker.id, report.evicted_keys)
        model.index.add(worker.id, report.stored_keys)
        if report.adapters is not None and worker.update_adapters(report.adapters):
            self._state.publish_models()
        for ended in report.ended:
            job = worker.jobs.get(ended.job_id) or worker.coming.get(ended.job_id)
            if job is not None and job.ended_by(ended, worker):
                self._end(job, ended, worker, now)
        for job in worker.missing_jobs(now, self._limits.grace_s, self._state.commands.gateways):
            self._state.remove(job)
        self._state.to_dispatch[model.name] = None

    def _end(self, job: JobRecord, ended: EndedJob, worker: WorkerRecord, now: float) -> None:
        """A job ended at a worker: with its answer, or to go on elsewhere. The end of the answer may be reported before
        the handoff is."""
        if worker is not job.worker:
            self._state.hand_over(job, 0, now)
        if ended.handed_off and job.handoff_to is not None:
            self._state.hand_over(job, ended.tokens, now)
        else:
            self._state.end(job, ended.tokens, now)

    def detach(self, worker: WorkerRecord, now: float) -> None:
        """A worker's link broke: a worker with jobs has a grace period to come back, one without jobs is removed."""
        worker.detached_at = now
        self._state.models[worker.hello.card.name].served_at = now
        if not worker.jobs and not worker.coming:
            self._state.remove_worker(worker)

    def _lose(self, worker: WorkerRecord, why: str, now: float) -> None:
        """Removes a worker with its jobs and reports it as lost. Its jobs may still run: where their tokens flow,
        gateways leave them there, and the worker reports them when it registers again."""
        self._state.counters.workers_lost += 1
        self._state.poison.abandoned(worker.id, worker.probation_mark, now)
        for job in list(worker.jobs.values()):
            self._state.remove(job)
        self._state.remove_worker(worker)
        self._state.commands.add(DropWorker(worker.id, why))
        self._state.commands.broadcast(WorkerLost(worker.id))

    # ---- all workers and models ----

    def remove_lost(self, now: float) -> None:
        """Removes workers whose grace period is over, and workers with jobs that stalled."""
        for worker in list(self._state.workers.values()):
            if worker.detached_at is not None:
                if now - worker.detached_at > self._limits.grace_s:
                    self._lose(worker, "the worker did not register again after its link broke", now)
            elif worker.jobs and worker.silent(now):
                self._lose(worker, "the worker sent no reports", now)
            elif worker.jobs and worker.hung(now) and not worker.hint_sent:
                # Its link works, so it keeps its registration, and gets no new jobs until it makes progress.
                worker.hint_sent = True
                self._state.commands.broadcast(WorkerLost(worker.id))

    def forget_unserved(self, model: ModelRecord, now: float) -> None:
        """Forgets a model that has had neither workers nor waiting jobs for long enough."""
        remember_s = self._limits.remember_s if model.card else self._limits.unserved_s
        if not model.workers and not model.queue and now - model.served_at > remember_s:
            self._state.catalog.forget(model)
            self._state.publish_models()

    def _model_for(self, card: Card, now: float) -> ModelRecord:
        """The model that a worker with this card joins. Jobs that wait for other weights of that name are rejected."""
        model = self._state.models.get(card.name)
        if model is not None and model.card is not None and card.conflicts_with(model.card) and not model.workers:
            for job in list(model.queue):  # Tokenized with another tokenizer, or meant for other weights.
                model.queue.remove(job)
                self._admission.reject_dequeued(job, refusals.no_worker(self._limits.unserved_s), now)
        return self._state.catalog.model_for(card, now)
