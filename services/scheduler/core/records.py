"""What the scheduler stores about one job and one worker. Knows counts and times, never which job is next or why."""

import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.hashing import KEY_BYTES
from services.scheduler.core.messages import Adapter, EndedJob, Submit, WorkerHello, WorkerReport
from services.scheduler.core.placement import WORTH_MOVING_BLOCKS

UNREPORTED_S = 0.05  # A report that arrives this soon after an assignment may not include the job yet.
LONG = 1.5  # A job that takes so many times as long as others is no guide to when a credit is free.
CONTEXT_WEIGHT = 0.1  # Blocks of prefill backlog that one block of a running job's context is worth.


class Need(NamedTuple):
    """What a job needs of its worker. Jobs with equal needs wait for the same workers."""

    gateway_id: str | None
    """Its gateway must reach the worker."""
    adapter: bytes
    """The worker must have it; empty for none."""
    avoid: frozenset[str]
    """Workers that failed the job, which get it only if there is no other."""
    divided: bool
    """Where roles divide the work, it may wait for a worker for prompts, too."""
    suspect: bool = False
    """The worker must have no other suspect on probation."""


class JobRecord:
    """One attempt of a job: it waits in a queue, follows a waiting leader, or holds a credit of a worker."""

    __slots__ = (
        "assigned_at",
        "charged",
        "deadline",
        "express",
        "followers",
        "gateway_id",
        "handoff_placement",
        "handoff_to",
        "leader",
        "matched_blocks",
        "model_name",
        "need",
        "order",
        "placement",
        "priority",
        "produced",
        "queued_at",
        "source",
        "submit",
        "worker",
    )

    def __init__(self, submit: Submit, gateway_id: str | None, order: int, now: float) -> None:
        self.submit = submit
        self.gateway_id = gateway_id  # None: a worker reported the job after the scheduler's start.
        self.order = order
        self.priority = submit.priority
        self.model_name = ""  # Set when the job is admitted: the model's own name, also if `submit` has an alias.
        self.queued_at = now
        long = len(submit.block_keys) >= (WORTH_MOVING_BLOCKS - 1) * KEY_BYTES  # The last block has no key.
        self.need = Need(gateway_id, submit.adapter, submit.avoid, divided=long and submit.divisible)
        self.deadline = math.inf if submit.deadline_s is None else now + submit.deadline_s
        self.express = False  # It waits in the express lane of its queue.
        self.worker: WorkerRecord | None = None
        self.assigned_at = 0.0
        self.matched_blocks = 0
        self.placement = 0  # The number of the last Assigned for this job; 0 if this scheduler sent none.
        self.handoff_to: WorkerRecord | None = None  # Holds a credit, too: the job continues there.
        self.handoff_placement = 0  # As `placement`, of that worker.
        self.produced = 0  # Tokens of this attempt at workers that handed it off.
        self.source = ""  # host:port of a worker that holds more blocks of the prompt; empty for none.
        self.charged = 0  # Tokens charged to the tenant.
        self.leader: JobRecord | None = None
        self.followers: list[JobRecord] = []

    def __repr__(self) -> str:
        where = f"on {self.worker.id}" if self.worker else "waiting"
        return f"JobRecord({self.id!r}, attempt {self.attempt}, {where})"

    @property
    def id(self) -> str:
        """Unique in the mesh, except for a duplicate that a second gateway submits."""
        return self.submit.job_id

    @property
    def attempt(self) -> int:
        """From 1."""
        return self.submit.attempt

    @property
    def tenant(self) -> str:
        """The hashed name of the tenant."""
        return self.submit.tenant

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt of the job ran."""
        return self.submit.attempt > 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens to compute before the first new one."""
        return self.submit.prompt_tokens

    def ended_by(self, ended: EndedJob, worker: "WorkerRecord") -> bool:
        """Whether a worker's end means this attempt and this placement.

        An end of an earlier attempt, or of a cancelled job with the same id, must not free this job's credit.
        """
        placement = self.placement if worker is self.worker else self.handoff_placement
        unnumbered = not ended.placement or not placement
        return ended.attempt == self.attempt and (unnumbered or ended.placement == placement)


@dataclass(slots=True)
class UnreportedPrompt:
    """Prompt tokens that were assigned to a worker at a time, and that its reports do not count yet."""

    assigned_at: float
    tokens: int


class WorkerRecord:
    """A registered worker: its credits, load and progress."""

    def __init__(self, hello: WorkerHello, now: float, stall_s: float) -> None:
        self.hello = hello
        self.id = hello.worker_id
        self.jobs: dict[str, JobRecord] = {}
        self.coming: dict[str, JobRecord] = {}
        """Jobs that another worker will hand off to this one."""
        self.detached_at: float | None = None
        self.draining = False
        self.last_report = WorkerReport()
        self.adapters: dict[bytes, Adapter] = {each.fingerprint: each for each in hello.adapters}
        self.listed_adapters = _listed(hello.adapters)
        """As gateways receive them."""
        self._context_tokens = 0
        self._unreported: deque[UnreportedPrompt] = deque()
        self._unreported_tokens = 0
        self.probation: JobRecord | None = None
        """The suspect that runs here; there is at most one. It stays until it has produced tokens."""
        self.hint_sent = False
        """Gateways have received a WorkerLost since the last progress."""
        self._stall_s = stall_s
        self._progress_at = self._reported_at = self._computed_at = now
        self._limit_s = stall_s

    def __repr__(self) -> str:
        return f"WorkerRecord({self.id!r}, {len(self.jobs)}/{self.hello.credits} jobs)"

    # -- credits --

    @property
    def room(self) -> int:
        """Credits less jobs: how many more jobs the worker runs at once. Negative while it has jobs ahead."""
        return self.hello.credits - len(self.jobs) - len(self.coming)

    @property
    def free_credits(self) -> int:
        """Credits without a job."""
        return max(0, self.room)

    def credit_free_s(self, place: int, each_s: float, token_s: float, now: float) -> float:
        """Seconds until a credit is free for the job at this place of those that wait (from 0), if each job takes
        `each_s`, and `token_s` for each token. A job that takes much longer, and that may have more tokens, may go on
        for any time: its credit is not counted on."""
        place -= self.room
        if place < 0 or not self.jobs:
            return 0.0
        running = min(len(self.jobs), self.hello.credits)
        long = self._long(LONG * each_s, token_s, now)
        counted = running - long
        if counted <= 0:
            long, counted = 0, running
        waves, place = divmod(place, counted)
        began = next(itertools.islice(self.jobs.values(), long + place, None)).assigned_at
        return waves * each_s + max(0.0, each_s - (now - began))

    def _long(self, seconds: float, token_s: float, now: float) -> int:
        """How many jobs have had their credits for more than these seconds, and may have more tokens: one that had the
        time for all its tokens ends soon, it or its worker is only slower than forecast. Jobs are in the order of
        assignment."""
        running = itertools.islice(self.jobs.values(), self.hello.credits)
        older = itertools.takewhile(lambda job: now - job.assigned_at > seconds, running)
        return sum(now - job.assigned_at < job.submit.max_tokens * token_s for job in older)

    def add_job(self, job: JobRecord, now: float) -> None:
        """Gives a job one of the worker's credits."""
        assert job.worker is None, job
        assert job.id not in self.jobs, (self, job)
        job.worker = self
        job.assigned_at = now
        self.jobs[job.id] = job
        self._context_tokens += job.prompt_tokens + job.submit.max_tokens

    def add_unreported(self, prompt_tokens: int, now: float) -> None:
        """Counts prompt tokens that were just assigned, until a report includes them."""
        self._unreported.append(UnreportedPrompt(now, prompt_tokens))
        self._unreported_tokens += prompt_tokens

    def begin_next(self, now: float) -> None:
        """A job has ended: the first of those that the worker has ahead takes its place there."""
        for job in itertools.islice(self.jobs.values(), self.hello.credits, self.hello.credits + 1):
            job.assigned_at = now

    def remove_job(self, job: JobRecord) -> None:
        """Takes a job's credit back."""
        assert job.worker is self, job
        job.worker = None
        del self.jobs[job.id]
        if self.probation is job:
            self.probation = None
        self._context_tokens -= job.prompt_tokens + job.submit.max_tokens

    def expect(self, job: JobRecord) -> None:
        """Gives a credit to a job that another worker will hand off."""
        assert job.handoff_to is None, job
        job.handoff_to = self
        self.coming[job.id] = job
        self._context_tokens += job.prompt_tokens + job.submit.max_tokens

    def expect_no_more(self, job: JobRecord) -> None:
        """Takes that credit back."""
        assert job.handoff_to is self, job
        job.handoff_to = None
        del self.coming[job.id]
        self._context_tokens -= job.prompt_tokens + job.submit.max_tokens

    @property
    def probation_mark(self) -> bytes:
        """The fingerprint of the job on probation; empty for none."""
        return self.probation.submit.fingerprint if self.probation is not None else b""

    # -- adapters --

    def serves(self, job: JobRecord) -> bool:
        """Whether the worker has the job's adapter, if the job has one."""
        return not job.submit.adapter or job.submit.adapter in self.adapters

    def is_cold(self, job: JobRecord) -> bool:
        """Whether the job would wait until its adapter is in device memory."""
        adapter = self.adapters.get(job.submit.adapter)
        return adapter is not None and not adapter.resident

    def update_adapters(self, adapters: tuple[Adapter, ...]) -> bool:
        """Stores the adapters that a worker reports. Returns whether the list that gateways receive has changed."""
        before = self.listed_adapters
        self.adapters = {each.fingerprint: each for each in adapters}
        self.listed_adapters = _listed(adapters)
        return self.listed_adapters != before

    # -- load --

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that the worker has still to compute, including those that no report counts yet."""
        return self.last_report.prefill_backlog + self._unreported_tokens

    @property
    def backlog_blocks(self) -> float:
        """The worker's load in blocks of prompt: its prefill backlog plus a tenth of the context of its jobs."""
        return (self.backlog_tokens + CONTEXT_WEIGHT * self._context_tokens) / self.hello.card.block_size

    # -- progress --

    def update(self, report: WorkerReport, now: float) -> None:
        """Stores a report. It counts as progress if the worker completed steps or had nothing to do."""
        last = self.last_report
        was_busy = report.running and last.running
        if report.steps != last.steps or not (was_busy or (report.busy and last.busy)):
            self._progress_at = self._computed_at = now
            self.hint_sent = False
        elif report.engine_cpu_s != last.engine_cpu_s:
            self._computed_at = now
        self._reported_at = now
        self.last_report = report
        self.draining = report.draining
        self._limit_s = max(self._stall_s, 3 * report.step_s)
        while self._unreported and self._unreported[0].assigned_at <= now - UNREPORTED_S:
            self._unreported_tokens -= self._unreported.popleft().tokens

    def suspect(self, now: float) -> bool:
        """Whether the worker made no progress for `stall_s` seconds and three of its predicted steps. It keeps its
        jobs: it may lack CPU time, or only its link to the scheduler may be slow."""
        return now > self._progress_at + self._limit_s

    def silent(self, now: float) -> bool:
        """Whether no report arrived for as long: a worker reports twice a second, also during a step."""
        return now > self._reported_at + self._limit_s

    def hung(self, now: float) -> bool:
        """Whether its engine neither completed a step nor used the CPU for as long."""
        return now > self._computed_at + self._limit_s

    def healthy(self, now: float) -> bool:
        """Whether new jobs may go to the worker if it has free credits."""
        return not self.suspect(now) and self.detached_at is None and not self.draining

    def excuse_pause(self, pause_s: float) -> None:
        """Moves all time-outs: the scheduler itself did not run for `pause_s` seconds."""
        self._progress_at += pause_s
        self._reported_at += pause_s
        self._computed_at += pause_s
        if self.detached_at is not None:
            self.detached_at += pause_s

    def missing_jobs(self, now: float, grace_s: float, attached: Mapping[str, float]) -> list[JobRecord]:
        """Jobs that hold a credit but, by the counts of the last report, never reached the worker.

        A gateway may die between the scheduler's answer and its own message to the worker, or its link may break
        before the answer or the job's withdrawal has arrived. `attached`: when each attached gateway sent its hello.
        Jobs that it submitted since then count as missing only if the worker is idle.
        """
        old = [job for job in self.jobs.values() if now - job.assigned_at > grace_s]
        surplus = len(old) - self.last_report.running - self.last_report.waiting
        if surplus <= 0:
            return []
        idle = not self.last_report.running and not self.last_report.waiting
        if idle and self.last_report.busy:  # The engine has not taken its first jobs yet: its counts are older.
            return []
        return [job for job in old if idle or job.queued_at < attached.get(job.gateway_id or "", math.inf)][:surplus]


def _listed(adapters: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
    return tuple(sorted(each._replace(resident=False) for each in adapters))
