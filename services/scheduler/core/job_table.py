"""All jobs of the scheduler, and which job follows which. Pure; knows neither queues nor credits, decides nothing."""

from collections.abc import Mapping

from services.scheduler.core.models import ModelRecord
from services.scheduler.core.records import JobRecord


class JobTable:
    """Jobs that wait or run, by id and by identity, and followers of waiting leaders, by gateway and id.

    A job without an identity leads no other. `models` holds the models of all jobs by name; each counts its followers.
    """

    def __init__(self, models: Mapping[str, ModelRecord]) -> None:
        self._models = models
        self._by_id: dict[str, JobRecord] = {}
        self._leaders: dict[bytes, JobRecord] = {}
        self._followers: dict[tuple[str | None, str], JobRecord] = {}

    # -- jobs --

    def get(self, job_id: str) -> JobRecord | None:
        """The waiting or running job with this id."""
        return self._by_id.get(job_id)

    def leader_of(self, job: JobRecord) -> JobRecord | None:
        """The waiting or running job with the same identity."""
        return self._leaders.get(job.submit.identity)

    def waiting_of(self, gateway_id: str) -> list[JobRecord]:
        """The jobs of a gateway that wait in a queue."""
        return [job for job in self._by_id.values() if job.gateway_id == gateway_id and job.worker is None]

    def add(self, job: JobRecord, model_name: str) -> None:
        """Adds a job that waits or runs."""
        job.model_name = model_name
        self._by_id[job.id] = job
        if job.submit.identity:
            self._leaders[job.submit.identity] = job

    def forget(self, job: JobRecord) -> list[JobRecord]:
        """Removes a job that neither waits nor runs any more; returns the followers that it leaves."""
        del self._by_id[job.id]
        if self._leaders.get(job.submit.identity) is job:
            del self._leaders[job.submit.identity]
        return self.release_followers(job)

    # -- followers --

    def follower(self, gateway_id: str | None, job_id: str) -> JobRecord | None:
        """The follower with this id that this gateway submitted."""
        return self._followers.get((gateway_id, job_id))

    def followers_from(self, gateway_id: str) -> list[JobRecord]:
        """All followers that a gateway submitted."""
        return [job for job in self._followers.values() if job.gateway_id == gateway_id]

    def followers_in(self, model: ModelRecord) -> list[JobRecord]:
        """All followers that ask for a model."""
        if not model.followers:
            return []
        return [job for job in self._followers.values() if job.model_name == model.name]

    def follow(self, job: JobRecord, leader: JobRecord) -> None:
        """Makes a job follow a leader that waits in a queue."""
        job.leader = leader
        job.model_name = leader.model_name
        leader.followers.append(job)
        self._models[leader.model_name].followers += 1
        self._followers[job.gateway_id, job.id] = job

    def unfollow(self, job: JobRecord) -> None:
        """Detaches a follower from its leader."""
        assert job.leader is not None, job
        job.leader.followers.remove(job)
        job.leader = None
        self._models[job.model_name].followers -= 1
        del self._followers[job.gateway_id, job.id]

    def release_followers(self, leader: JobRecord) -> list[JobRecord]:
        """Detaches and returns the followers of a leader, longest waiting first."""
        followers = list(leader.followers)
        for follower in followers:
            self.unfollow(follower)
        return followers

    # -- invariants --

    def check_integrity(self, alive: Mapping[str, JobRecord]) -> None:
        """Asserts what must hold between two events; for tests. `alive` holds the jobs that wait or run, by id."""
        assert self._by_id == alive, (self._by_id, alive)
        for identity, leader in self._leaders.items():
            assert self._by_id.get(leader.id) is leader, (identity, leader)
        followers = [follower for job in self._by_id.values() for follower in job.followers]
        assert sorted(map(id, followers)) == sorted(map(id, self._followers.values())), followers
        for model in self._models.values():
            own = [job for job in followers if job.model_name == model.name]
            assert model.followers == len(own), (model, own)
