"""Which jobs there are, and who follows whom. Pure; knows neither lines nor credits, and decides nothing."""

from collections.abc import Mapping

from services.scheduler.models import Model
from services.scheduler.workers import Job


class Jobs:
    """All jobs that wait or run, by id and by identity, and those that follow a waiting leader, by their gateways.

    A job without an identity leads nobody. `models` are those of all jobs, by name: each counts its followers.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._by_id: dict[str, Job] = {}
        self._leaders: dict[bytes, Job] = {}
        self._followers: dict[tuple[str | None, str], Job] = {}

    # -- jobs --

    def get(self, job_id: str) -> Job | None:
        """The job of this id that waits or runs."""
        return self._by_id.get(job_id)

    def leader_of(self, job: Job) -> Job | None:
        """The job that computes what this one asks for."""
        return self._leaders.get(job.submit.identity)

    def waiting_of(self, gateway_id: str) -> list[Job]:
        """A gateway's jobs in line."""
        return [job for job in self._by_id.values() if job.gateway_id == gateway_id and job.worker is None]

    def add(self, job: Job, model_name: str) -> None:
        """A job waits in a line or runs."""
        job.model_name = model_name
        self._by_id[job.id] = job
        if job.submit.identity:
            self._leaders[job.submit.identity] = job

    def forget(self, job: Job) -> list[Job]:
        """A job neither waits nor runs any more; returns the followers that it leaves behind."""
        del self._by_id[job.id]
        if self._leaders.get(job.submit.identity) is job:
            del self._leaders[job.submit.identity]
        return self.release_followers(job)

    # -- followers --

    def follower(self, gateway_id: str | None, job_id: str) -> Job | None:
        """A gateway's job of this id that follows another."""
        return self._followers.get((gateway_id, job_id))

    def followers_from(self, gateway_id: str) -> list[Job]:
        """A gateway's jobs that follow others."""
        return [job for job in self._followers.values() if job.gateway_id == gateway_id]

    def followers_in(self, model: Model) -> list[Job]:
        """Jobs of a model that follow others."""
        if not model.following:
            return []
        return [job for job in self._followers.values() if job.model_name == model.name]

    def follow(self, job: Job, leader: Job) -> None:
        """A job waits for what comes of a leader in line."""
        job.leader = leader
        job.model_name = leader.model_name
        leader.followers.append(job)
        self._models[leader.model_name].following += 1
        self._followers[job.gateway_id, job.id] = job

    def unfollow(self, job: Job) -> None:
        """A job follows nobody any more."""
        assert job.leader is not None, job
        job.leader.followers.remove(job)
        job.leader = None
        self._models[job.model_name].following -= 1
        del self._followers[job.gateway_id, job.id]

    def release_followers(self, leader: Job) -> list[Job]:
        """Detaches and returns the followers of a leader, longest waiting first."""
        followers = list(leader.followers)
        for follower in followers:
            self.unfollow(follower)
        return followers

    # -- invariants --

    def check_integrity(self, alive: Mapping[str, Job]) -> None:
        """Asserts what must hold between any two events, where `alive` wait or run; for tests."""
        assert self._by_id == alive, (self._by_id, alive)
        for identity, leader in self._leaders.items():
            assert self._by_id.get(leader.id) is leader, (identity, leader)
        followers = [follower for job in self._by_id.values() for follower in job.followers]
        assert sorted(map(id, followers)) == sorted(map(id, self._followers.values())), followers
        for model in self._models.values():
            own = [job for job in followers if job.model_name == model.name]
            assert model.following == len(own), (model, own)
