"""The one state machine of jobs and workers: events in, commands out. Knows no clock, no socket and no token.

Each `on_...` method takes one event and the time, and returns the commands that follow from it. A job is waiting in the
line of its model, following a waiting leader, or in the books of one worker; every submitted attempt gets exactly one
answer (assigned, joined or rejected) unless its gateway withdraws it or leaves.
"""

from services.scheduler.core import admission
from services.scheduler.core.routing import Routing
from services.scheduler.core.state import State
from services.scheduler.limits import Limits
from services.scheduler.messages import (
    Card,
    Command,
    DropWorker,
    Hello,
    Loading,
    Refused,
    Report,
    Submit,
    ToWorker,
    WorkerHello,
    WorkerLost,
)
from services.scheduler.models import Model
from services.scheduler.workers import Worker


class Pool:
    """Jobs and workers of the mesh."""

    def __init__(self, epoch: int, now: float, limits: Limits | None = None) -> None:
        self.epoch = epoch
        self.limits = limits or Limits()
        books = self._books = State(now)
        self.counters, self.catalog = books.counters, books.catalog
        self.models, self.workers = books.models, books.workers
        self._routing = Routing(books, self.limits)

    # ---- events: gateways ----

    def on_gateway_attached(self, gateway_id: str, now: float) -> list[Command]:
        """A gateway said hello. If it was here before, what it waited for is forgotten: it will submit again."""
        self._routing.drop_waiting(gateway_id, now)
        self._books.out.gateways[gateway_id] = None
        self._books.out.tell(gateway_id, Hello(self.epoch))
        self._books.out.tell(gateway_id, self.catalog.told)
        return self._commands(now)

    def on_gateway_detached(self, gateway_id: str, now: float) -> list[Command]:
        """A gateway's link broke: its waiting jobs are dropped, its running ones run on."""
        self._books.out.gateways.pop(gateway_id, None)
        self._routing.drop_waiting(gateway_id, now)
        return self._commands(now)

    def on_submit(self, gateway_id: str, submit: Submit, now: float) -> list[Command]:
        """A job looks for a worker."""
        self.counters.submitted += 1
        previous = self._books.jobs.follower(gateway_id, submit.job_id)
        if previous is not None:
            self._books.jobs.unfollow(previous)
        self._routing.route(self._books.new_job(submit, gateway_id, now), now)
        return self._commands(now)

    def on_withdraw(self, gateway_id: str, job_id: str, now: float) -> list[Command]:
        """A job needs no worker any more. If it was just assigned, the credit comes back: it will not be sent."""
        follower = self._books.jobs.follower(gateway_id, job_id)
        job = self._books.jobs.get(job_id)
        if follower is not None:
            self.counters.withdrawn += 1
            self._books.jobs.unfollow(follower)
        elif job is not None and job.gateway_id == gateway_id:
            self.counters.withdrawn += 1
            self._routing.promote(self._books.remove(job), job.order, now)
        return self._commands(now)

    # ---- events: workers ----

    def on_loading(self, loading: Loading, now: float) -> list[Command]:
        """A worker that is not there yet says how far it is."""
        if loading.worker_id not in self.workers:
            self.catalog.load(loading)
            self._books.models_changed()
        return self._commands(now)

    def on_loading_ended(self, worker_id: str, now: float) -> list[Command]:
        """A worker's start is over, one way or the other."""
        if self.catalog.loaded(worker_id):
            self._books.models_changed()
        return self._commands(now)

    def on_worker_attached(self, hello: WorkerHello, now: float) -> list[Command]:
        """A worker registers, comes back after its link broke, or says after our restart what it runs."""
        known = self.models.get(hello.card.name)
        others = [worker for worker in known.workers.values() if worker.id != hello.worker_id] if known else []
        failure = admission.objection(hello, [worker.hello.card for worker in others])
        if failure is not None:
            self._books.out.add(ToWorker(hello.worker_id, Refused(failure)))
            return self._commands(now)
        self.counters.workers_attached += 1
        model = self._model_for(hello.card, now)
        worker = Worker(hello, now, self.limits.stall_s)
        self._take_over(worker, self.workers.get(worker.id), now)
        self.workers[worker.id] = worker
        self.catalog.loaded(worker.id)
        model.join(worker, now)
        self._books.out.add(ToWorker(worker.id, Hello(self.epoch)))
        self._books.models_changed()
        self._books.changed[model.name] = None
        return self._commands(now)

    def on_report(self, worker_id: str, report: Report, now: float) -> list[Command]:
        """A worker says what happened. Of one that was lost nothing counts until it says hello again."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.detached_at is not None:
            return []
        worker.hear(report, now)
        model = self.models[worker.hello.card.name]
        model.index.drop(worker_id, report.evicted_keys)
        model.index.add(worker_id, report.stored_keys)
        for ended in report.ended:
            job = worker.jobs.get(ended.job_id)
            if job is not None and job.ended_by(ended):
                self._books.end(job, ended.tokens)
        for job in worker.never_came(now, self.limits.grace_s, self._books.out.gateways):
            self._books.remove(job)
        self._books.changed[model.name] = None
        return self._commands(now)

    def on_worker_detached(self, worker_id: str, now: float) -> list[Command]:
        """A worker's link broke: with jobs it has a grace to come back, without any it is simply gone."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.detached_at is None:
            worker.detached_at = now
            self.models[worker.hello.card.name].served_at = now
            if not worker.jobs:
                self._books.take_out(worker)
        return self._commands(now)

    # ---- events: time ----

    def on_tick(self, now: float) -> list[Command]:
        """Time passed: finds lost workers, expired jobs, models that nobody serves any more."""
        for worker in list(self.workers.values()):
            if worker.detached_at is not None:
                if now - worker.detached_at > self.limits.grace_s:
                    self._lose(worker, "did not come back")
            elif worker.jobs and worker.silent(now):
                self._lose(worker, "no progress")
        for model in list(self.models.values()):
            served = bool(model.healthy(now))
            if served:
                model.served_at = now
            self._routing.reject_overdue(model, served, now)
            self._forget_unserved(model, now)
        return self._commands(now)

    def on_pause(self, pause_s: float) -> None:
        """We did not listen for so long: that silence is no worker's fault."""
        for worker in self.workers.values():
            worker.forgive(pause_s)

    # ---- workers ----

    def _take_over(self, worker: Worker, old: Worker | None, now: float) -> None:
        """Moves the jobs that a worker says it runs into its books; what it ran before and no longer does has ended."""
        for ref in worker.hello.running:
            job = self._books.jobs.get(ref.job_id)
            if job is not None and job.worker is not None and job.worker is old and job.attempt == ref.attempt:
                old.release(job)
                worker.take(job, job.assigned_at)
            elif job is None or (job.worker is not None and job.attempt < ref.attempt):
                if job is not None:
                    self._books.remove(job)
                self._books.adopt(ref, worker, now)
        if old is not None:
            for job in list(old.jobs.values()):
                self._books.release(job, job.prompt_tokens)
            self.models[old.hello.card.name].leave(old)

    def _lose(self, worker: Worker, why: str) -> None:
        """A worker is lost: gateways hear it and bring the next attempts of what it ran."""
        self.counters.workers_lost += 1
        for job in list(worker.jobs.values()):
            self._books.remove(job)
        self._books.take_out(worker)
        self._books.out.add(DropWorker(worker.id, why))
        self._books.out.broadcast(WorkerLost(worker.id))

    # ---- models ----

    def _model_for(self, card: Card, now: float) -> Model:
        """The model that a worker with this card joins. Jobs that wait for other weights of that name are rejected."""
        model = self.models.get(card.name)
        if model is not None and model.card is not None and card.conflicts_with(model.card) and not model.workers:
            for job in list(model.line):  # Made with another tokenizer or for other weights.
                model.line.remove(job)
                self._routing.reject_waiting(job, admission.no_worker(self.limits.orphan_s), now)
        return self.catalog.of_card(card, now)

    def _forget_unserved(self, model: Model, now: float) -> None:
        patience_s = self.limits.remember_s if model.card else self.limits.orphan_s
        if not model.workers and not model.line and now - model.served_at > patience_s:
            self.catalog.drop(model)
            self._books.models_changed()

    # ---- the turn of jobs ----

    def _commands(self, now: float) -> list[Command]:
        """Dispatches where something changed, then hands over what is to be done."""
        while self._books.changed:
            name, _ = self._books.changed.popitem()
            if name in self.models:
                self._dispatch(self.models[name], now)
        return self._books.out.take()

    def _dispatch(self, model: Model, now: float) -> None:
        """Gives the free credits of a model to the jobs whose turn it is."""
        healthy = model.healthy(now) if model.line else []
        aside = []
        while model.line and any(worker.free_credits for worker in healthy):
            job = model.line.pop()
            if job.deadline <= now:
                self._routing.reject_waiting(job, admission.deadline_expired(), now)
                continue
            choice = model.place(job, healthy)
            if choice is None:  # The free workers failed it before; others may take what it leaves.
                aside.append(job)
                continue
            job.matched_blocks = choice.matched_blocks
            self._books.assign(job, self.workers[choice.worker_id], model, now)
            self._routing.place_followers(job, now)
        for job in aside:
            model.line.push(job)

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Asserts what must hold between any two events; for tests."""
        assert not self._books.changed, self._books.changed
        assert not self._books.out, self._books.out
        self._books.check_integrity()
