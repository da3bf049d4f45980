"""The one state machine of jobs and workers: events in, commands out. Knows no clock, no socket and no token.

Each `on_...` method takes one event and the time, and returns the commands that follow from it. A job is waiting in the
line of its model, following a waiting leader, or in the books of one worker; every submitted attempt gets exactly one
answer (assigned, joined or rejected) unless its gateway withdraws it or leaves.
"""

from dataclasses import dataclass

from services.scheduler import admission
from services.scheduler.catalog import Catalog
from services.scheduler.commands import Commands
from services.scheduler.jobs import Jobs
from services.scheduler.messages import (
    Card,
    Command,
    Counters,
    DropWorker,
    Failure,
    Hello,
    JobRef,
    Loading,
    Refused,
    Report,
    Submit,
    ToWorker,
    WorkerHello,
    WorkerLost,
)
from services.scheduler.models import Model
from services.scheduler.workers import Job, Worker


@dataclass(frozen=True, slots=True)
class Limits:
    """The pool's patience."""

    queue_limit: int = 2048  # Jobs that may wait for one model.
    grace_s: float = 2.0  # A worker whose link broke keeps its jobs so long.
    stall_s: float = 2.0  # A busy worker without progress for so long, and for three announced steps, is lost.
    orphan_s: float = 2.0  # Jobs wait so long for a first healthy worker.
    remember_s: float = 30.0  # A model without workers is known so long.


class Pool:
    """Jobs and workers of the mesh."""

    def __init__(self, epoch: int, now: float, limits: Limits | None = None) -> None:
        self.epoch = epoch
        self.limits = limits or Limits()
        self.counters = Counters()
        self.catalog = Catalog(now)
        self.workers: dict[str, Worker] = {}
        self._jobs = Jobs(self.catalog.by_name)
        self._order = self._placements = 0
        self._dirty: dict[str, None] = {}
        self._out = Commands()

    @property
    def models(self) -> dict[str, Model]:
        """By name."""
        return self.catalog.by_name

    # ---- events: gateways ----

    def on_gateway_attached(self, gateway_id: str, now: float) -> list[Command]:
        """A gateway said hello. If it was here before, what it waited for is forgotten: it will submit again."""
        self._drop_waiting(gateway_id, now)
        self._out.gateways[gateway_id] = None
        self._out.tell(gateway_id, Hello(self.epoch))
        self._out.tell(gateway_id, self.catalog.told)
        return self._commands(now)

    def on_gateway_detached(self, gateway_id: str, now: float) -> list[Command]:
        """A gateway's link broke: its waiting jobs are dropped, its running ones run on."""
        self._out.gateways.pop(gateway_id, None)
        self._drop_waiting(gateway_id, now)
        return self._commands(now)

    def on_submit(self, gateway_id: str, submit: Submit, now: float) -> list[Command]:
        """A job looks for a worker."""
        self.counters.submitted += 1
        previous = self._jobs.follower(gateway_id, submit.job_id)
        if previous is not None:
            self._jobs.unfollow(previous)
        self._route(self._new_job(submit, gateway_id, now), now)
        return self._commands(now)

    def on_withdraw(self, gateway_id: str, job_id: str, now: float) -> list[Command]:
        """A job needs no worker any more. If it was just assigned, the credit comes back: it will not be sent."""
        follower = self._jobs.follower(gateway_id, job_id)
        job = self._jobs.get(job_id)
        if follower is not None:
            self.counters.withdrawn += 1
            self._jobs.unfollow(follower)
        elif job is not None and job.gateway_id == gateway_id:
            self.counters.withdrawn += 1
            self._promote(self._remove(job), job.order, now)
        return self._commands(now)

    # ---- events: workers ----

    def on_loading(self, loading: Loading, now: float) -> list[Command]:
        """A worker that is not there yet says how far it is."""
        if loading.worker_id not in self.workers:
            self.catalog.load(loading)
            self._models_changed()
        return self._commands(now)

    def on_loading_ended(self, worker_id: str, now: float) -> list[Command]:
        """A worker's start is over, one way or the other."""
        if self.catalog.loaded(worker_id):
            self._models_changed()
        return self._commands(now)

    def on_worker_attached(self, hello: WorkerHello, now: float) -> list[Command]:
        """A worker registers, comes back after its link broke, or says after our restart what it runs."""
        known = self.models.get(hello.card.name)
        others = [worker for worker in known.workers.values() if worker.id != hello.worker_id] if known else []
        failure = admission.objection(hello, [worker.hello.card for worker in others])
        if failure is not None:
            self._out.add(ToWorker(hello.worker_id, Refused(failure)))
            return self._commands(now)
        self.counters.workers_attached += 1
        model = self._model_for(hello.card, now)
        worker = Worker(hello, now, self.limits.stall_s)
        self._take_over(worker, self.workers.get(worker.id), now)
        self.workers[worker.id] = worker
        self.catalog.loaded(worker.id)
        model.join(worker, now)
        self._out.add(ToWorker(worker.id, Hello(self.epoch)))
        self._models_changed()
        self._dirty[model.name] = None
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
                self._end(job, ended.tokens)
        for job in worker.never_came(now, self.limits.grace_s, self._out.gateways):
            self._remove(job)
        self._dirty[model.name] = None
        return self._commands(now)

    def on_worker_detached(self, worker_id: str, now: float) -> list[Command]:
        """A worker's link broke: with jobs it has a grace to come back, without any it is simply gone."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.detached_at is None:
            worker.detached_at = now
            self.models[worker.hello.card.name].served_at = now
            if not worker.jobs:
                self._take_out(worker)
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
            self._reject_overdue(model, served, now)
            self._forget_unserved(model, now)
        return self._commands(now)

    def on_pause(self, pause_s: float) -> None:
        """We did not listen for so long: that silence is no worker's fault."""
        for worker in self.workers.values():
            worker.forgive(pause_s)

    # ---- a job's way in ----

    def _new_job(self, submit: Submit, gateway_id: str | None, now: float) -> Job:
        self._order += 1
        return Job(submit, gateway_id, self._order, now)

    def _route(self, job: Job, now: float) -> None:
        """Finds the place of a job that has none: beside a twin, behind a leader, or in line."""
        twin = self._jobs.get(job.id)
        orphans: list[Job] = []
        if twin is not None:
            if not self._replaces(job, twin):
                self._meet(job, twin)
                return
            job.order = twin.order
            orphans = self._remove(twin)
        leader = self._jobs.leader_of(job)
        if leader is not None and self._may_follow(job, leader):
            self._follow(job, leader)
        else:
            self._admit(job, now)
        for orphan in orphans:
            self._route(orphan, now)

    def _replaces(self, job: Job, twin: Job) -> bool:
        """A later attempt fences an earlier one of its own gateway or of unknown owner.

        Another gateway's attempt is left alone, unless it is on a worker that failed the newcomer.
        """
        if job.attempt <= twin.attempt:
            return False
        if twin.gateway_id in (job.gateway_id, None):
            return True
        return not self._may_follow(job, twin) and job.submit.body == twin.submit.body

    def _meet(self, job: Job, twin: Job) -> None:
        """The job id is in flight already, at this attempt or a later one: a retry of the same request, or a clash.

        Of jobs that only a worker told us of the body is unknown; their id holds the tenant, so joining is safe.
        """
        known = twin.gateway_id is not None
        if known and job.submit.body != twin.submit.body:
            self._reject(job, admission.request_id_in_use())
        elif job.gateway_id != twin.gateway_id:
            self._follow(job, twin)
        elif job.attempt < twin.attempt:
            self._reject(job, admission.request_id_in_use())
        elif twin.worker is not None:
            # Its answer was lost with the gateway's link, or its end there is on the way, and this is a job of its own.
            # A waiting twin's answer will still come.
            twin.queued_at = twin.assigned_at = job.queued_at
            self._tell_assigned(twin)

    def _admit(self, job: Job, now: float) -> None:
        """Puts a job in the line of its model, or refuses it."""
        model = self.catalog.resolve(job.submit.model, now, self.limits.orphan_s)
        if model is None:
            self._reject(job, admission.model_not_found())
            return
        failure = self._refusal(job, model, now)
        if failure is not None:
            self._reject(job, failure)
            return
        self._jobs.add(job, model.name)
        model.line.push(job)
        self._dirty[model.name] = None

    def _refusal(self, job: Job, model: Model, now: float) -> Failure | None:
        if job.deadline <= now:
            return admission.deadline_expired()
        if job.resumed:  # Its client already has tokens: it is never turned away for want of room.
            return None
        if self._full(model, job.tenant):
            return admission.queue_full(model.retry_after_s(model.healthy(now)))
        if job.submit.deadline_s is not None:
            paces = model.paces(job, model.healthy(now))
            if now + admission.first_token_s(paces, model.ahead(job.tenant, job.priority)) > job.deadline:
                return admission.deadline_unmeetable()
        return None

    def _full(self, model: Model, tenant: str) -> bool:
        """No job of this tenant may wait any more: whoever fills the line leaves the others their shares of it."""
        waiting, most = len(model.line) + model.following, self.limits.queue_limit
        if waiting < most or waiting >= 2 * most:
            return waiting >= most
        followers = sum(job.tenant == tenant for job in self._jobs.followers_in(model))
        return model.line.waiting(tenant) + followers >= most / model.line.sharers(tenant)

    def _dispatch(self, model: Model, now: float) -> None:
        """Gives the free credits of a model to the jobs whose turn it is."""
        healthy = model.healthy(now) if model.line else []
        aside = []
        while model.line and any(worker.free_credits for worker in healthy):
            job = model.line.pop()
            if job.deadline <= now:
                self._reject_waiting(job, admission.deadline_expired(), now)
                continue
            choice = model.place(job, healthy)
            if choice is None:  # The free workers failed it before; others may take what it leaves.
                aside.append(job)
                continue
            job.matched_blocks = choice.matched_blocks
            self._assign(job, self.workers[choice.worker_id], model, now)
        for job in aside:
            model.line.push(job)

    def _assign(self, job: Job, worker: Worker, model: Model, now: float) -> None:
        worker.take(job, now)
        worker.expect(job.prompt_tokens - job.matched_blocks * worker.hello.card.block_size, now)
        model.charge(job)
        self.counters.assigned += 1
        self.counters.prompt_blocks += model.blocks(job)
        self.counters.matched_blocks += job.matched_blocks
        self._tell_assigned(job)
        for follower in self._jobs.release_followers(job):
            if worker.id in follower.submit.avoid:
                self._route(follower, now)
            else:
                self._tell_joined(follower, job)

    # ---- leaders and followers ----

    def _may_follow(self, job: Job, leader: Job) -> bool:
        if leader.id == job.submit.unjoinable:
            return False
        return leader.worker is None or leader.worker.id not in job.submit.avoid

    def _follow(self, job: Job, leader: Job) -> None:
        """A job shares a leader's tokens: told where at once, or when a waiting leader has a worker."""
        if leader.worker is not None:
            self._tell_joined(job, leader)
            return
        model = self.models[leader.model_name]
        if self._full(model, job.tenant) and not job.resumed:
            self._reject(job, admission.queue_full(1.0))
            return
        self._jobs.follow(job, leader)
        if job.priority > leader.priority:
            model.line.remove(leader)
            leader.priority = job.priority
            model.line.push(leader)

    def _promote(self, orphans: list[Job], order: int, now: float) -> None:
        """Jobs whose leader went before it had a worker: the first takes its place, the others follow that one."""
        if orphans:
            orphans[0].order = order
        for job in orphans:
            self._route(job, now)

    # ---- a job's ways out ----

    def _end(self, job: Job, tokens: int) -> None:
        """A job's worker runs it no more."""
        self.counters.ended += 1
        self.counters.tokens += tokens
        self.models[job.model_name].learn(tokens)
        self._release(job, job.prompt_tokens + tokens)

    def _release(self, job: Job, cost: int) -> None:
        """A running job gives back its credit and what it was charged beyond `cost` tokens."""
        assert job.worker is not None, job
        self.models[job.model_name].settle(job, cost)
        self._dirty[job.model_name] = None
        job.worker.release(job)
        self._jobs.forget(job)

    def _remove(self, job: Job) -> list[Job]:
        """Takes a job out of the line or the books, free of charge; returns the followers that it leaves behind."""
        if job.worker is not None:
            self._release(job, 0)
            return []
        self.models[job.model_name].line.remove(job)
        return self._jobs.forget(job)

    def _reject_waiting(self, job: Job, failure: Failure, now: float) -> None:
        """Rejects a job that was already taken out of the line."""
        orphans = self._jobs.forget(job)
        self._reject(job, failure)
        self._promote(orphans, job.order, now)

    def _drop_waiting(self, gateway_id: str, now: float) -> None:
        """Forgets what a gateway waits for; jobs of others that followed it move up."""
        for follower in self._jobs.followers_from(gateway_id):
            self._jobs.unfollow(follower)
        for job in self._jobs.waiting_of(gateway_id):
            self._promote(self._remove(job), job.order, now)

    def _reject_overdue(self, model: Model, served: bool, now: float) -> None:
        """Rejects waiting jobs whose deadline passed, or that waited long enough for a first healthy worker."""
        for job in self._jobs.followers_in(model):
            if job.deadline <= now:
                self._jobs.unfollow(job)
                self._reject(job, admission.deadline_expired())
        for job in list(model.line):
            if job.deadline <= now:
                model.line.remove(job)
                self._reject_waiting(job, admission.deadline_expired(), now)
            elif not served and now - max(model.served_at, job.queued_at) > self.limits.orphan_s:
                model.line.remove(job)
                self._reject_waiting(job, self._unserved(model), now)

    def _unserved(self, model: Model) -> Failure:
        return admission.no_worker(self.limits.orphan_s) if model.card else admission.model_not_found()

    # ---- workers ----

    def _take_over(self, worker: Worker, old: Worker | None, now: float) -> None:
        """Moves the jobs that a worker says it runs into its books; what it ran before and no longer does has ended."""
        for ref in worker.hello.running:
            job = self._jobs.get(ref.job_id)
            if job is not None and job.worker is not None and job.worker is old and job.attempt == ref.attempt:
                old.release(job)
                worker.take(job, job.assigned_at)
            elif job is None or (job.worker is not None and job.attempt < ref.attempt):
                if job is not None:
                    self._remove(job)
                self._adopt(ref, worker, now)
        if old is not None:
            for job in list(old.jobs.values()):
                self._release(job, job.prompt_tokens)
            self.models[old.hello.card.name].leave(old)

    def _adopt(self, ref: JobRef, worker: Worker, now: float) -> None:
        """A worker runs a job that we do not know: we were restarted, or its next attempt is yet to be submitted."""
        name = worker.hello.card.name
        job = self._new_job(Submit(ref.job_id, ref.attempt, model=name), None, now)
        self._jobs.add(job, name)
        worker.take(job, now)

    def _lose(self, worker: Worker, why: str) -> None:
        """A worker is lost: gateways hear it and bring the next attempts of what it ran."""
        self.counters.workers_lost += 1
        for job in list(worker.jobs.values()):
            self._remove(job)
        self._take_out(worker)
        self._out.add(DropWorker(worker.id, why))
        self._out.broadcast(WorkerLost(worker.id))

    def _take_out(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self.models[worker.hello.card.name].leave(worker)
        self._models_changed()

    # ---- models ----

    def _model_for(self, card: Card, now: float) -> Model:
        """The model that a worker with this card joins. Jobs that wait for other weights of that name are rejected."""
        model = self.models.get(card.name)
        if model is not None and model.card is not None and card.conflicts_with(model.card) and not model.workers:
            for job in list(model.line):  # Made with another tokenizer or for other weights.
                model.line.remove(job)
                self._reject_waiting(job, admission.no_worker(self.limits.orphan_s), now)
        return self.catalog.of_card(card, now)

    def _forget_unserved(self, model: Model, now: float) -> None:
        patience_s = self.limits.remember_s if model.card else self.limits.orphan_s
        if not model.workers and not model.line and now - model.served_at > patience_s:
            self.catalog.drop(model)
            self._models_changed()

    def _models_changed(self) -> None:
        """Tells all gateways what is served, if that is news."""
        if (news := self.catalog.news()) is not None:
            self._out.broadcast(news)

    # ---- commands ----

    def _tell_assigned(self, job: Job) -> None:
        """Each answer has a number, which the job's end repeats: it frees the credit of no later answer."""
        self._placements += 1
        job.placement = self._placements
        self._out.assigned(job)

    def _tell_joined(self, job: Job, leader: Job) -> None:
        self.counters.joined += 1
        self._out.joined(job, leader)

    def _reject(self, job: Job, failure: Failure) -> None:
        rejected = self.counters.rejected
        rejected[failure.reason] = rejected.get(failure.reason, 0) + 1
        self._out.rejected(job, failure)

    def _commands(self, now: float) -> list[Command]:
        """Dispatches where something changed, then hands over what is to be done."""
        while self._dirty:
            name, _ = self._dirty.popitem()
            if name in self.models:
                self._dispatch(self.models[name], now)
        return self._out.take()

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Asserts what must hold between any two events; for tests."""
        waiting = {job.id: job for model in self.models.values() for job in model.line}
        running = {job.id: job for worker in self.workers.values() for job in worker.jobs.values()}
        assert not waiting.keys() & running.keys(), waiting.keys() & running.keys()
        self._jobs.check_integrity(waiting | running)
        assert not self._dirty, self._dirty
        assert not self._out, self._out
        for worker in self.workers.values():
            model = self.models[worker.hello.card.name]
            assert model.workers[worker.id] is worker, worker
            assert all(job.worker is worker for job in worker.jobs.values()), worker
        assert sum(len(model.workers) for model in self.models.values()) == len(self.workers)
