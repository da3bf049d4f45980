"""One model of the mesh: its card, its workers, the queue of its jobs. Knows no gateways and sends nothing."""

from services.scheduler.core.fairness import TokenCounters, WaitingQueue
from services.scheduler.core.forecast import QueuePosition, WorkerLoad, wait_s
from services.scheduler.core.messages import Card, ServedModel
from services.scheduler.core.placement import Candidate, Choice, PrefixIndex, choose
from services.scheduler.core.records import JobRecord, WorkerRecord

ANSWER_SMOOTHING = 0.1
"""Weight of the newest answer in the moving average of answer lengths."""


class ModelRecord:
    """A model, its workers and its queue. Without a card it is a name that no worker serves yet."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.card: Card | None = None
        self.workers: dict[str, WorkerRecord] = {}
        self.queue: WaitingQueue[JobRecord] = WaitingQueue(TokenCounters())
        self.index = PrefixIndex()
        self.followers = 0  # Jobs that follow a waiting leader.
        self.served_at = now  # When the model last had a healthy worker.
        self.answer_tokens = 0.0  # Moving average over ended jobs; 0 until one has ended.

    def __repr__(self) -> str:
        return f"ModelRecord({self.name!r}, {len(self.workers)} workers, {len(self.queue)} waiting)"

    def add_worker(self, worker: WorkerRecord, now: float) -> None:
        """Adds a worker and the blocks that it has cached."""
        self.card = worker.hello.card
        self.workers[worker.id] = worker
        self.index.remove_worker(worker.id)
        self.index.add(worker.id, worker.hello.stored_keys)
        self.served_at = now

    def remove_worker(self, worker: WorkerRecord) -> None:
        """Removes a worker and its cached blocks."""
        del self.workers[worker.id]
        self.index.remove_worker(worker.id)

    def take_queue(self, unserved: "ModelRecord") -> None:
        """Takes over the jobs of a record without a card, whose name is now known to be an alias of this model."""
        for job in list(unserved.queue):
            job.model_name = self.name
            for follower in job.followers:
                follower.model_name = self.name
            self.queue.push(job)
        self.followers += unserved.followers

    def healthy(self, now: float) -> list[WorkerRecord]:
        """Workers that new jobs may go to if they have free credits."""
        return [worker for worker in self.workers.values() if worker.healthy(now)]

    def served(self) -> ServedModel:
        """The model as gateways receive it."""
        assert self.card is not None, self
        return ServedModel(self.card, tuple(sorted(worker.hello.address for worker in self.workers.values())))

    # -- placement --

    def choose_worker(self, job: JobRecord, healthy: list[WorkerRecord]) -> Choice | None:
        """The best of the healthy workers with a free credit; None if the job must wait.

        Workers that failed the job before are candidates only if no other worker is healthy.
        """
        avoid = job.submit.avoid
        if avoid:
            healthy = [worker for worker in healthy if worker.id not in avoid] or healthy
        candidates = [Candidate(w.id, w.backlog_blocks, len(w.jobs)) for w in healthy if w.free_credits]
        if not candidates:
            return None
        return choose(candidates, self.blocks(job), self.index.match(job.submit.block_keys))

    def blocks(self, job: JobRecord) -> int:
        """Blocks of a job's prompt, including a partial last one."""
        assert self.card is not None, self
        return -(-job.prompt_tokens // self.card.block_size)

    # -- forecasts --

    def loads(self, job: JobRecord, healthy: list[WorkerRecord]) -> list[WorkerLoad]:
        """The load of each healthy worker, and what it would have to compute for the job's prompt."""
        matched = self.index.match(job.submit.block_keys)
        return [
            _load(worker, job.prompt_tokens - matched.get(worker.id, 0) * worker.hello.card.block_size)
            for worker in healthy
        ]

    def queue_position(self, tenant: str, priority: int) -> QueuePosition:
        """What would wait before a new job of this tenant."""
        jobs = self.queue.jobs_before(tenant, priority)
        share = jobs / len(self.queue) if jobs else 0.0
        return QueuePosition(jobs, int(share * self.queue.prompt_tokens), self.answer_tokens)

    def retry_after_s(self, healthy: list[WorkerRecord]) -> float:
        """When a full queue is likely to have room: half the time that the whole queue takes, 0.5 to 10 s."""
        loads = [_load(worker, 0) for worker in healthy]
        whole = QueuePosition(len(self.queue), self.queue.prompt_tokens, self.answer_tokens)
        return min(max(wait_s(loads, whole) / 2, 0.5), 10.0)

    # -- costs --

    def charge(self, job: JobRecord) -> None:
        """Charges a starting job to its tenant, as if the answer had the greatest allowed length."""
        job.charged = job.prompt_tokens + job.submit.max_tokens
        self.queue.counters.charge(job.tenant, job.charged)

    def settle(self, job: JobRecord, cost: int) -> None:
        """Corrects the charge of a job that left its worker to `cost` tokens.

        A job that only a worker reported was never charged: its tenant is unknown.
        """
        if job.gateway_id is not None:
            self.queue.counters.charge(job.tenant, cost - job.charged)
            job.charged = 0

    def record_answer(self, tokens: int) -> None:
        """Updates the average answer length with that of an ended job."""
        if not self.answer_tokens:
            self.answer_tokens = float(tokens)
        self.answer_tokens += ANSWER_SMOOTHING * (tokens - self.answer_tokens)


def _load(worker: WorkerRecord, uncached_tokens: int) -> WorkerLoad:
    return WorkerLoad(
        credits=worker.hello.credits,
        free_credits=worker.free_credits,
        backlog_tokens=worker.backlog_tokens,
        uncached_tokens=uncached_tokens,
        prefill_rate=worker.last_report.prefill_rate,
        decode_s=worker.last_report.decode_s,
    )
