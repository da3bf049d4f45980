"""The state machine of jobs and workers: events in, commands out. Knows no clock, no socket and no token.

Each `on_...` method takes one event and the time, and returns the commands that follow from it. A job waits in the
queue of its model, follows a waiting leader, or holds a credit of one worker. Each submitted attempt gets exactly one
answer (Assigned, Joined or Rejected) unless its gateway withdraws it or detaches.
"""

from services.scheduler.core.admission import Admission
from services.scheduler.core.limits import Limits
from services.scheduler.core.membership import Membership
from services.scheduler.core.messages import (
    Command,
    SchedulerHello,
    Submit,
    Suspects,
    WorkerHello,
    WorkerLoading,
    WorkerReport,
)
from services.scheduler.core.models import ModelRecord
from services.scheduler.core.records import JobRecord, Need, WorkerRecord
from services.scheduler.core.state import State

_LOOK_AHEAD = 8
"""Jobs that a pass looks at beyond those whose prompts wait for a worker for prompts: the prompt of a later one may be
where answers are computed."""


class SchedulerCore:
    """Applies events to the state and assigns waiting jobs to free credits."""

    def __init__(self, epoch: int, now: float, limits: Limits | None = None) -> None:
        self.epoch = epoch
        self.limits = limits or Limits()
        self.state = State(now)
        self._admission = Admission(self.state, self.limits)
        self._membership = Membership(self.state, self._admission, self.limits)

    # ---- events: gateways ----

    def on_gateway_attached(self, gateway_id: str, now: float) -> list[Command]:
        """A gateway sent its hello. Its waiting jobs of an earlier link are dropped: it will submit them again."""
        self._admission.drop_waiting(gateway_id, now)
        self.state.reach.forget(gateway_id)
        self.state.commands.gateways[gateway_id] = now
        self.state.commands.send(gateway_id, SchedulerHello(self.epoch))
        self.state.commands.send(gateway_id, self.state.catalog.published)
        if suspects := self.state.poison.suspects():
            self.state.commands.send(gateway_id, Suspects(suspects))
        return self._commands(now)

    def on_gateway_detached(self, gateway_id: str, now: float) -> list[Command]:
        """A gateway's link broke: its waiting jobs are dropped, its running jobs continue."""
        self.state.commands.gateways.pop(gateway_id, None)
        self.state.reach.forget(gateway_id)
        self._admission.drop_waiting(gateway_id, now)
        return self._commands(now)

    def on_submit(self, gateway_id: str, submit: Submit, now: float) -> list[Command]:
        """A gateway requests a worker for a job."""
        self.state.counters.submitted += 1
        previous = self.state.jobs.follower(gateway_id, submit.job_id)
        if previous is not None:
            self.state.jobs.unfollow(previous)
        if submit.lost_on:
            worker = self.state.workers.get(submit.lost_on)
            jobs, mark = (len(worker.jobs), worker.probation_mark) if worker is not None else (0, b"")
            self.state.poison.died(submit, jobs, mark, now)
        self._admission.admit(self.state.new_job(submit, gateway_id, now), now)
        return self._commands(now)

    def on_survived(self, gateway_id: str, job_id: str, now: float) -> list[Command]:
        """A job on probation has produced tokens: the next suspect may run at its worker."""
        job = self.state.jobs.get(job_id)
        if job is not None and job.gateway_id == gateway_id and job.worker is not None and job.worker.probation is job:
            job.worker.probation = None
            self.state.poison.survived(job.submit.fingerprint)
            self.state.to_dispatch[job.model_name] = None
        return self._commands(now)

    def on_withdraw(self, gateway_id: str, job_id: str, now: float) -> list[Command]:
        """A job needs no worker any more. If it was just assigned, its credit is free: the gateway does not send it."""
        follower = self.state.jobs.follower(gateway_id, job_id)
        job = self.state.jobs.get(job_id)
        if follower is not None:
            self.state.counters.withdrawn += 1
            self.state.jobs.unfollow(follower)
        elif job is not None and job.gateway_id == gateway_id:
            self.state.counters.withdrawn += 1
            self._admission.admit_followers(self.state.remove(job), job.order, now)
        return self._commands(now)

    def on_unreachable(self, gateway_id: str, addresses: frozenset[str], now: float) -> list[Command]:
        """A gateway reports to which workers, by host:port, it has no working link."""
        self.state.reach.update(gateway_id, addresses, now)
        self.state.to_dispatch.update(dict.fromkeys(self.state.models))
        return self._commands(now)

    # ---- events: workers ----

    def on_loading(self, loading: WorkerLoading, now: float) -> list[Command]:
        """A starting worker reports its progress."""
        if loading.worker_id not in self.state.workers:
            self.state.catalog.note_loading(loading)
            self.state.publish_models()
        return self._commands(now)

    def on_loading_ended(self, worker_id: str, now: float) -> list[Command]:
        """The start of a worker succeeded or failed."""
        if self.state.catalog.end_loading(worker_id):
            self.state.publish_models()
        return self._commands(now)

    def on_worker_attached(self, hello: WorkerHello, now: float) -> list[Command]:
        """A worker registers: for the first time, after its link broke, or after the scheduler was restarted."""
        self._membership.register(hello, self.epoch, now)
        return self._commands(now)

    def on_report(self, worker_id: str, report: WorkerReport, now: float) -> list[Command]:
        """A worker reports. Reports of a lost or detached worker are ignored until it registers again."""
        worker = self.state.workers.get(worker_id)
        if worker is None or worker.detached_at is not None:
            return []
        self._membership.update(worker, report, now)
        return self._commands(now)

    def on_worker_detached(self, worker_id: str, now: float) -> list[Command]:
        """A worker's link broke."""
        worker = self.state.workers.get(worker_id)
        if worker is not None and worker.detached_at is None:
            self._membership.detach(worker, now)
        return self._commands(now)

    # ---- events: time ----

    def on_tick(self, now: float) -> list[Command]:
        """Time passed: removes lost workers, rejects overdue jobs, forgets models without workers."""
        self._membership.remove_lost(now)
        for model in list(self.state.models.values()):
            healthy = model.healthy(now)
            if healthy:
                model.served_at = now
            self._admission.reject_overdue(model, healthy, now)
            self._membership.forget_unserved(model, now)
        return self._commands(now)

    def on_pause(self, pause_s: float) -> None:
        """The scheduler's own process did not run for `pause_s` seconds: no worker is blamed for that time."""
        for worker in self.state.workers.values():
            worker.excuse_pause(pause_s)

    # ---- assignment ----

    def _commands(self, now: float) -> list[Command]:
        """Assigns jobs where the event made that possible, then returns all commands of the event."""
        poison = self.state.poison
        if poison.changed:
            changed, poison.changed = poison.changed, set()
            self._admission.review(changed, now)
            self.state.commands.broadcast(Suspects(poison.suspects()))
        while self.state.to_dispatch:
            name, _ = self.state.to_dispatch.popitem()
            if name in self.state.models:
                self._assign_waiting(self.state.models[name], now)
        return self.state.commands.take_all()

    def _assign_waiting(self, model: ModelRecord, now: float) -> None:
        """Assigns the waiting jobs of a model, in their order, as long as a worker that they may go to has room."""
        healthy = model.healthy(now) if model.queue else []
        passed: list[JobRecord] = []
        while model.queue and model.has_room(healthy):
            open_to = self._with_room(model, healthy, divided=len(passed) < _LOOK_AHEAD)
            job = model.queue.pop(open_to)
            if job is None:
                break
            workers = open_to[job.need]
            if not self._admission.dequeued_in_time(job, model, workers, now):
                continue
            choice = model.choose_worker(job, workers)
            if choice is None:  # Its prompt needs a worker for prompts, and these are full.
                passed.append(job)
                continue
            if job.need.suspect:
                self.state.workers[choice.worker_id].probation = job
            self.state.assign(job, choice, model, now, self._admission.crowded_for_s(model, healthy))
            self._admission.join_followers(job, now)
        for job in passed:
            model.queue.put_back(job)

    def _with_room(
        self, model: ModelRecord, healthy: list[WorkerRecord], divided: bool
    ) -> dict[Need, list[WorkerRecord]]:
        """By what waiting jobs need, the workers that are open to them, where one of these has room."""
        open_to = {}
        for need in model.queue.needs:
            workers = self.state.reach.open_to(need, healthy)
            if (workers is healthy or model.has_room(workers)) and (divided or not need.divided):
                open_to[need] = workers
        return open_to

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Asserts what must hold between two events; for tests."""
        self.state.check_integrity()
