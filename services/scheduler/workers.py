"""What the scheduler knows of one worker and one job: its books. Knows counts and times, never who is next or why."""

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from services.scheduler.messages import Ended, Report, Submit, WorkerHello

FLIGHT_S = 0.05  # A report sent this long after an assignment may still not know the job.
CONTEXT_WEIGHT = 0.1  # Blocks of prefill backlog that one block of a running job's context is worth.


class Job:
    """One attempt of a job: waiting in line, following a waiting leader, or in the books of a worker."""

    __slots__ = (
        "assigned_at",
        "charged",
        "deadline",
        "followers",
        "gateway_id",
        "leader",
        "matched_blocks",
        "model_name",
        "order",
        "placement",
        "priority",
        "queued_at",
        "submit",
        "worker",
    )

    def __init__(self, submit: Submit, gateway_id: str | None, order: int, now: float) -> None:
        self.submit = submit
        self.gateway_id = gateway_id  # None: a worker told us of it, after this scheduler's start.
        self.order = order
        self.priority = submit.priority
        self.model_name = ""  # The name that an alias stood for; known once it is admitted.
        self.queued_at = now
        self.deadline = math.inf if submit.deadline_s is None else now + submit.deadline_s
        self.worker: Worker | None = None
        self.assigned_at = 0.0
        self.matched_blocks = 0
        self.placement = 0  # The last answer that assigned it; 0: none that we know of.
        self.charged = 0
        self.leader: Job | None = None
        self.followers: list[Job] = []

    def __repr__(self) -> str:
        where = f"on {self.worker.id}" if self.worker else "waiting"
        return f"Job({self.id!r}, attempt {self.attempt}, {where})"

    @property
    def id(self) -> str:
        """Unique in the mesh, but for a second gateway's twin of it."""
        return self.submit.job_id

    @property
    def attempt(self) -> int:
        """From 1."""
        return self.submit.attempt

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.submit.tenant

    @property
    def resumed(self) -> bool:
        """An earlier attempt of it ran."""
        return self.submit.attempt > 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens to compute before its first new one."""
        return self.submit.prompt_tokens

    def ended_by(self, ended: Ended) -> bool:
        """Whether this end is its own, and not an earlier attempt's or that of a cancelled job of the same name."""
        unnumbered = not ended.placement or not self.placement
        return ended.attempt == self.attempt and (unnumbered or ended.placement == self.placement)


@dataclass(slots=True)
class Assignment:
    """Prompt tokens on their way to a worker, which its reports do not count yet."""

    at: float
    tokens: int


class Worker:
    """A registered worker: its credits, load and pulse."""

    def __init__(self, hello: WorkerHello, now: float, stall_s: float) -> None:
        self.hello = hello
        self.id = hello.worker_id
        self.jobs: dict[str, Job] = {}
        self.detached_at: float | None = None
        self.draining = False
        self.last = Report()
        self._context_tokens = 0
        self._arriving: deque[Assignment] = deque()
        self._arriving_tokens = 0
        self._stall_s = stall_s
        self._moved_at = now
        self._silent_at = now + stall_s

    def __repr__(self) -> str:
        return f"Worker({self.id!r}, {len(self.jobs)}/{self.hello.credits} jobs)"

    # -- credits --

    @property
    def free_credits(self) -> int:
        """Jobs it wants beside those it has."""
        return max(0, self.hello.credits - len(self.jobs))

    def take(self, job: Job, now: float) -> None:
        """A job takes a credit."""
        assert job.worker is None, job
        assert job.id not in self.jobs, (self, job)
        job.worker = self
        job.assigned_at = now
        self.jobs[job.id] = job
        self._context_tokens += job.prompt_tokens + job.submit.max_tokens

    def expect(self, prompt_tokens: int, now: float) -> None:
        """Prompt tokens are on their way to it."""
        self._arriving.append(Assignment(now, prompt_tokens))
        self._arriving_tokens += prompt_tokens

    def release(self, job: Job) -> None:
        """A job gives its credit back."""
        assert job.worker is self, job
        job.worker = None
        del self.jobs[job.id]
        self._context_tokens -= job.prompt_tokens + job.submit.max_tokens

    # -- load --

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that it has not computed yet, those on their way included."""
        return self.last.prefill_backlog + self._arriving_tokens

    @property
    def backlog_blocks(self) -> float:
        """Its whole load in blocks of prompt: what it must still compute, and a tenth of what its jobs attend to."""
        return (self.backlog_tokens + CONTEXT_WEIGHT * self._context_tokens) / self.hello.card.block_size

    # -- pulse --

    def hear(self, report: Report, now: float) -> None:
        """A report came; it is progress if steps were made or nothing was to be done."""
        if report.steps != self.last.steps or not (report.running and self.last.running):
            self._moved_at = now
        self.last = report
        self.draining = report.draining
        self._silent_at = self._moved_at + max(self._stall_s, 3 * report.step_s)
        while self._arriving and self._arriving[0].at <= now - FLIGHT_S:
            self._arriving_tokens -= self._arriving.popleft().tokens

    def silent(self, now: float) -> bool:
        """It made no progress for longer than three of its announced steps, and than our patience."""
        return now > self._silent_at

    def ready(self, now: float) -> bool:
        """New jobs may go to it, credits permitting."""
        return now <= self._silent_at and self.detached_at is None and not self.draining

    def forgive(self, pause_s: float) -> None:
        """We did not listen for a while: that time counts against nobody."""
        self._moved_at += pause_s
        self._silent_at += pause_s
        if self.detached_at is not None:
            self.detached_at += pause_s

    def never_came(self, now: float, grace_s: float, present: Container[str]) -> list[Job]:
        """Jobs that took a credit but, by the counts of the last report, never reached the worker.

        A gateway may die between our answer and its message to the worker. Of a gateway that is present we believe it
        only when the worker is idle.
        """
        old = [job for job in self.jobs.values() if now - job.assigned_at > grace_s]
        surplus = len(old) - self.last.running - self.last.waiting
        if surplus <= 0:
            return []
        idle = not self.last.running and not self.last.waiting
        return [job for job in old if idle or job.gateway_id not in present][:surplus]
