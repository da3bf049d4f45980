"""What becomes of a submitted job: it joins a running job, follows a waiting one, enters a queue, or is rejected.

Pure. A waiting job that is removed may leave followers: each of them is admitted again.
"""

from collections.abc import Collection

from services.scheduler.core import forecast, lanes, refusals
from services.scheduler.core.lanes import Lane
from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import Failure
from services.scheduler.core.models import ModelRecord
from services.scheduler.core.records import JobRecord, WorkerRecord
from services.scheduler.core.state import State

_NEARLY_FULL = 7 / 8
"""Part of a queue's limit from which on gateways are asked to let fewer jobs wait. To refuse a job costs the scheduler
as much as to place one, and its client waits for it; a gateway refuses one at once."""


class Admission:
    """Decides about jobs that have no worker."""

    def __init__(self, state: State, limits: Limits) -> None:
        self._state, self._limits = state, limits

    def admit(self, job: JobRecord, now: float) -> None:
        """Decides about a job that neither waits nor runs: it joins a duplicate or a leader, or enters the queue."""
        if self._state.poison.poisoned(job.submit.fingerprint, now):
            self._state.reject(job, refusals.poisoned())
            return
        duplicate = self._state.jobs.get(job.id)
        followers_left: list[JobRecord] = []
        if duplicate is not None:
            if not self._replaces(job, duplicate):
                self._answer_duplicate(job, duplicate)
                return
            job.order = duplicate.order
            followers_left = self._state.remove(duplicate)
        leader = self._state.jobs.leader_of(job)
        if leader is not None and self._may_follow(job, leader):
            self._follow(job, leader)
        else:
            self._enqueue(job, now)
        for follower in followers_left:
            self.admit(follower, now)

    def admit_followers(self, followers_left: list[JobRecord], order: int, now: float) -> None:
        """Admits jobs whose leader left the queue: the first takes the leader's order, the others follow the first."""
        if followers_left:
            followers_left[0].order = order
        for job in followers_left:
            self.admit(job, now)

    def join_followers(self, leader: JobRecord, now: float) -> None:
        """Joins the followers of a leader that runs now, except those whose earlier attempt failed on its worker."""
        worker = leader.worker
        assert worker is not None, leader
        for follower in self._state.jobs.release_followers(leader):
            if not self._may_join_at(follower, worker):
                self.admit(follower, now)
            else:
                self._state.answer_joined(follower, leader)

    # ---- duplicates: jobs with the id of a job in flight ----

    def _replaces(self, job: JobRecord, duplicate: JobRecord) -> bool:
        """Whether a job takes the place of one with the same id.

        A later attempt replaces an earlier one of its own gateway or of an unknown gateway. It replaces that of another
        gateway only if that one is on a worker that failed the new job.
        """
        if job.attempt <= duplicate.attempt:
            return False
        if duplicate.gateway_id in (job.gateway_id, None):
            return True
        return not self._may_follow(job, duplicate) and job.submit.body == duplicate.submit.body

    def _answer_duplicate(self, job: JobRecord, duplicate: JobRecord) -> None:
        """Answers a job whose id is in flight at this attempt or a later one: a client's retry, or an id used twice.

        The body of a job that only a worker reported is unknown; its id contains the tenant, so joining it is safe.
        """
        known = duplicate.gateway_id is not None
        if known and job.submit.body != duplicate.submit.body:
            self._state.reject(job, refusals.request_id_in_use())
        elif job.gateway_id != duplicate.gateway_id:
            self._follow(job, duplicate)
        elif job.attempt < duplicate.attempt:
            self._state.reject(job, refusals.request_id_in_use())
        elif duplicate.worker is not None:
            # Either the first Assigned was lost with the gateway's link, or the worker's end of a cancelled job is on
            # its way and this is a new job. A waiting duplicate will still be answered.
            duplicate.queued_at = duplicate.assigned_at = job.queued_at
            self._state.answer_assigned(duplicate)

    # ---- the queue ----

    def _enqueue(self, job: JobRecord, now: float) -> None:
        """Puts a job in the queue of its model, or rejects it."""
        model = self._state.catalog.resolve(job.submit.model, now, self._limits.unserved_s)
        if model is None:
            self._state.reject(job, refusals.model_not_found())
            return
        failure = self._refusal(job, model, now)
        if failure is not None:
            self._state.reject(job, failure)
            return
        self._state.enqueue(job, model)

    def dequeued_in_time(self, job: JobRecord, model: ModelRecord, workers: list[WorkerRecord], now: float) -> bool:
        """Whether a job that was taken out of its queue can be answered by one of these workers before its deadline;
        else it is rejected."""
        if job.deadline <= now:
            self.reject_dequeued(job, refusals.deadline_expired(), now)
        elif (
            not job.resumed
            and job.submit.deadline_s is not None
            and job.queued_at != now  # It did not wait: its admission has just forecast the same.
            and now + forecast.answer_s(model.loads(job, workers), model.answer_tokens(job)) > job.deadline
        ):
            self.reject_dequeued(job, refusals.deadline_unmeetable(model.retry_after_s(workers)), now)
        else:
            return True
        return False

    def _refusal(self, job: JobRecord, model: ModelRecord, now: float) -> Failure | None:
        if job.deadline <= now:
            return refusals.deadline_expired()
        if job.resumed:  # Its client already has tokens: a full queue or a forecast never rejects it.
            return None
        if self._queue_is_full(model, job.tenant):
            return refusals.queue_full(model.retry_after_s(model.healthy(now)))
        healthy = model.healthy(now)
        able = self._state.reach.able(job.need, healthy) or healthy  # All if none is able now: one may be soon.
        lane = lanes.choose(job, model, able, self._limits.target_s, now)
        job.express = lane is Lane.EXPRESS
        if lane in (Lane.EXPRESS, Lane.NORMAL):
            return None
        retry_after_s = model.retry_after_s(able)
        return refusals.shed(retry_after_s) if lane is Lane.SHED else refusals.deadline_unmeetable(retry_after_s)

    def crowded_for_s(self, model: ModelRecord, healthy: list[WorkerRecord]) -> float:
        """After how many seconds to retry what is refused because the queue is nearly full; 0 if it is not."""
        waiting = len(model.queue) + model.followers
        return model.retry_after_s(healthy) if waiting >= _NEARLY_FULL * self._limits.queue_limit else 0.0

    def _queue_is_full(self, model: ModelRecord, tenant: str) -> bool:
        """Whether no more jobs of this tenant may wait.

        Beyond the limit, and up to twice the limit, a tenant may still queue its equal share of the limit: a tenant
        that fills the queue does not lock the others out.
        """
        waiting, limit = len(model.queue) + model.followers, self._limits.queue_limit
        if waiting < limit or waiting >= 2 * limit:
            return waiting >= limit
        followers = sum(job.tenant == tenant for job in self._state.jobs.followers_in(model))
        return model.queue.waiting_of(tenant) + followers >= limit / model.queue.tenants_with(tenant)

    # ---- leaders and followers: jobs with the same identity ----

    def _may_follow(self, job: JobRecord, leader: JobRecord) -> bool:
        if leader.id == job.submit.unjoinable:
            return False
        return leader.worker is None or self._may_join_at(job, leader.worker)

    def _may_join_at(self, job: JobRecord, worker: WorkerRecord) -> bool:
        """Whether a job may share the tokens of a job at this worker."""
        return worker.id not in job.submit.avoid and self._state.reach.allows(job, worker)

    def _follow(self, job: JobRecord, leader: JobRecord) -> None:
        """Makes a job share a leader's tokens: it is answered now, or when a waiting leader gets a worker."""
        if leader.worker is not None:
            self._state.answer_joined(job, leader)
            return
        model = self._state.models[leader.model_name]
        if self._queue_is_full(model, job.tenant) and not job.resumed:
            self._state.reject(job, refusals.queue_full(1.0))
            return
        self._state.jobs.follow(job, leader)
        if job.priority > leader.priority:
            model.queue.remove(leader)
            leader.priority = job.priority
            model.queue.push(leader)

    # ---- suspects ----

    def review(self, fingerprints: Collection[bytes], now: float) -> None:
        """Refuses the waiting jobs with those of the fingerprints that are poisoned now, and finds anew what the others
        need."""
        for model in self._state.models.values():
            for job in [job for job in model.queue if job.submit.fingerprint in fingerprints]:
                model.queue.remove(job)
                if self._state.poison.poisoned(job.submit.fingerprint, now):
                    self.reject_dequeued(job, refusals.poisoned(), now)
                else:
                    job.need = self._state.need(job)
                    model.queue.put_back(job)

    # ---- jobs that leave the queue ----

    def reject_dequeued(self, job: JobRecord, failure: Failure, now: float) -> None:
        """Rejects a job that was already taken out of its queue."""
        followers_left = self._state.jobs.forget(job)
        self._state.reject(job, failure)
        self.admit_followers(followers_left, job.order, now)

    def drop_waiting(self, gateway_id: str, now: float) -> None:
        """Forgets the waiting jobs of a gateway; followers from other gateways are admitted again."""
        for follower in self._state.jobs.followers_from(gateway_id):
            self._state.jobs.unfollow(follower)
        for job in self._state.jobs.waiting_of(gateway_id):
            self.admit_followers(self._state.remove(job), job.order, now)

    def reject_overdue(self, model: ModelRecord, healthy: list[WorkerRecord], now: float) -> None:
        """Rejects waiting jobs whose deadline passed or, if their gateway reaches no healthy worker of the model, whose
        wait is over."""
        for job in self._state.jobs.followers_in(model):
            if job.deadline <= now:
                self._state.jobs.unfollow(job)
                self._state.reject(job, refusals.deadline_expired())
        served = {need for need in model.queue.needs if self._state.reach.able(need, healthy)}
        for job in list(model.queue):
            if job.deadline <= now:
                model.queue.remove(job)
                self.reject_dequeued(job, refusals.deadline_expired(), now)
            elif job.need in served:
                continue
            elif now - self._unserved_since(job, model, healthy) > self._longest_wait_s(job, model):
                model.queue.remove(job)
                self.reject_dequeued(job, self._unserved(model), now)

    def _unserved_since(self, job: JobRecord, model: ModelRecord, healthy: list[WorkerRecord]) -> float:
        """Since when the gateway of a waiting job has reached no healthy worker of its model and adapter."""
        if not healthy:
            return max(model.served_at, job.queued_at)
        if not any(worker.serves(job) for worker in healthy):
            return job.queued_at  # Its adapter was dropped, or is being loaded.
        return max(self._state.reach.changed_at(job), job.queued_at)

    def _longest_wait_s(self, job: JobRecord, model: ModelRecord) -> float:
        """How long a job waits for a worker. The client of a resumed job has part of its answer: that job waits longer,
        and longest while a worker of its model loads, is silent, or is out of its gateway's reach."""
        if not job.resumed:
            return self._limits.unserved_s
        names = {model.name, *(model.card.aliases if model.card else ())}
        expected = model.workers or any(each.model in names for each in self._state.catalog.loading)
        return self._limits.resume_s if expected else self._limits.absent_s

    def _unserved(self, model: ModelRecord) -> Failure:
        return refusals.no_worker(self._limits.unserved_s) if model.card else refusals.model_not_found()
