"""Where a job without a place finds one: beside its twin, behind a leader, in the line of its model, or nowhere.

Pure. A job that leaves its place before it runs leaves followers behind: they look for places anew.
"""

from services.scheduler.core import admission
from services.scheduler.core.state import State
from services.scheduler.limits import Limits
from services.scheduler.messages import Failure
from services.scheduler.models import Model
from services.scheduler.workers import Job


class Routing:
    """Places of jobs that wait."""

    def __init__(self, books: State, limits: Limits) -> None:
        self._books, self._limits = books, limits

    def route(self, job: Job, now: float) -> None:
        """Finds the place of a job that has none: beside a twin, behind a leader, or in line."""
        twin = self._books.jobs.get(job.id)
        orphans: list[Job] = []
        if twin is not None:
            if not self._replaces(job, twin):
                self._meet(job, twin)
                return
            job.order = twin.order
            orphans = self._books.remove(twin)
        leader = self._books.jobs.leader_of(job)
        if leader is not None and self._may_follow(job, leader):
            self._follow(job, leader)
        else:
            self._admit(job, now)
        for orphan in orphans:
            self.route(orphan, now)

    def promote(self, orphans: list[Job], order: int, now: float) -> None:
        """Jobs whose leader went before it had a worker: the first takes its place, the others follow that one."""
        if orphans:
            orphans[0].order = order
        for job in orphans:
            self.route(job, now)

    def place_followers(self, leader: Job, now: float) -> None:
        """A leader runs: its followers share its tokens, but for those whose attempt on its worker failed."""
        worker = leader.worker
        assert worker is not None, leader
        for follower in self._books.jobs.release_followers(leader):
            if worker.id in follower.submit.avoid:
                self.route(follower, now)
            else:
                self._books.tell_joined(follower, leader)

    # ---- twins ----

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
            self._books.reject(job, admission.request_id_in_use())
        elif job.gateway_id != twin.gateway_id:
            self._follow(job, twin)
        elif job.attempt < twin.attempt:
            self._books.reject(job, admission.request_id_in_use())
        elif twin.worker is not None:
            # Its answer was lost with the gateway's link, or its end there is on the way, and this is a job of its own.
            # A waiting twin's answer will still come.
            twin.queued_at = twin.assigned_at = job.queued_at
            self._books.tell_assigned(twin)

    # ---- the line ----

    def _admit(self, job: Job, now: float) -> None:
        """Puts a job in the line of its model, or refuses it."""
        model = self._books.catalog.resolve(job.submit.model, now, self._limits.orphan_s)
        if model is None:
            self._books.reject(job, admission.model_not_found())
            return
        failure = self._refusal(job, model, now)
        if failure is not None:
            self._books.reject(job, failure)
            return
        self._books.line_up(job, model)

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
        waiting, most = len(model.line) + model.following, self._limits.queue_limit
        if waiting < most or waiting >= 2 * most:
            return waiting >= most
        followers = sum(job.tenant == tenant for job in self._books.jobs.followers_in(model))
        return model.line.waiting(tenant) + followers >= most / model.line.sharers(tenant)

    # ---- leaders and followers ----

    def _may_follow(self, job: Job, leader: Job) -> bool:
        if leader.id == job.submit.unjoinable:
            return False
        return leader.worker is None or leader.worker.id not in job.submit.avoid

    def _follow(self, job: Job, leader: Job) -> None:
        """A job shares a leader's tokens: told where at once, or when a waiting leader has a worker."""
        if leader.worker is not None:
            self._books.tell_joined(job, leader)
            return
        model = self._books.models[leader.model_name]
        if self._full(model, job.tenant) and not job.resumed:
            self._books.reject(job, admission.queue_full(1.0))
            return
        self._books.jobs.follow(job, leader)
        if job.priority > leader.priority:
            model.line.remove(leader)
            leader.priority = job.priority
            model.line.push(leader)

    # ---- ways out ----

    def reject_waiting(self, job: Job, failure: Failure, now: float) -> None:
        """Rejects a job that was already taken out of the line."""
        orphans = self._books.jobs.forget(job)
        self._books.reject(job, failure)
        self.promote(orphans, job.order, now)

    def drop_waiting(self, gateway_id: str, now: float) -> None:
        """Forgets what a gateway waits for; jobs of others that followed it move up."""
        for follower in self._books.jobs.followers_from(gateway_id):
            self._books.jobs.unfollow(follower)
        for job in self._books.jobs.waiting_of(gateway_id):
            self.promote(self._books.remove(job), job.order, now)

    def reject_overdue(self, model: Model, served: bool, now: float) -> None:
        """Rejects waiting jobs whose deadline passed, or that waited long enough for a first healthy worker."""
        for job in self._books.jobs.followers_in(model):
            if job.deadline <= now:
                self._books.jobs.unfollow(job)
                self._books.reject(job, admission.deadline_expired())
        for job in list(model.line):
            if job.deadline <= now:
                model.line.remove(job)
                self.reject_waiting(job, admission.deadline_expired(), now)
            elif not served and now - max(model.served_at, job.queued_at) > self._limits.orphan_s:
                model.line.remove(job)
                self.reject_waiting(job, self._unserved(model), now)

    def _unserved(self, model: Model) -> Failure:
        return admission.no_worker(self._limits.orphan_s) if model.card else admission.model_not_found()
