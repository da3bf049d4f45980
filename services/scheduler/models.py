"""One model of the mesh: its card, its workers, the jobs that wait for them. Knows no gateways and sends nothing."""

from services.scheduler.core.admission import Pace, QueuePosition, wait_s
from services.scheduler.core.fairness import Tally, WaitingQueue
from services.scheduler.core.placement import Candidate, Choice, PrefixIndex, choose
from services.scheduler.messages import Card, Served
from services.scheduler.workers import Job, Worker

ANSWER_SMOOTHING = 0.1


class Model:
    """The pool of workers of one model. Without a card it is a name that nobody serves yet."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.card: Card | None = None
        self.workers: dict[str, Worker] = {}
        self.line: WaitingQueue[Job] = WaitingQueue(Tally())
        self.index = PrefixIndex()
        self.following = 0  # Jobs that wait for a waiting leader.
        self.served_at = now  # When a healthy worker was last seen.
        self.answer_tokens = 0.0  # Of a typical job; 0 until one ended.

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {len(self.workers)} workers, {len(self.line)} waiting)"

    def join(self, worker: Worker, now: float) -> None:
        """A worker serves this model."""
        self.card = worker.hello.card
        self.workers[worker.id] = worker
        self.index.forget(worker.id)
        self.index.add(worker.id, worker.hello.stored_keys)
        self.served_at = now

    def leave(self, worker: Worker) -> None:
        """A worker serves it no more."""
        del self.workers[worker.id]
        self.index.forget(worker.id)

    def take_line(self, early: "Model") -> None:
        """The jobs that wait for a name of this model, from before it was known to be one, wait for it."""
        for job in list(early.line):
            job.model_name = self.name
            for follower in job.followers:
                follower.model_name = self.name
            self.line.push(job)
        self.following += early.following

    def healthy(self, now: float) -> list[Worker]:
        """Workers that new jobs may go to, credits permitting."""
        return [worker for worker in self.workers.values() if worker.ready(now)]

    def served(self) -> Served:
        """The model as gateways see it."""
        assert self.card is not None, self
        return Served(self.card, tuple(sorted(worker.hello.address for worker in self.workers.values())))

    # -- placement --

    def place(self, job: Job, healthy: list[Worker]) -> Choice | None:
        """The best of the healthy workers with a free credit; None if the job must wait.

        Workers that failed the job before are taken only when no others are healthy at all.
        """
        avoid = job.submit.avoid
        if avoid:
            healthy = [worker for worker in healthy if worker.id not in avoid] or healthy
        candidates = [Candidate(w.id, w.backlog_blocks, len(w.jobs)) for w in healthy if w.free_credits]
        if not candidates:
            return None
        return choose(candidates, self.blocks(job), self.index.match(job.submit.block_keys))

    def blocks(self, job: Job) -> int:
        """Blocks of a job's prompt, a partial last one included."""
        assert self.card is not None, self
        return -(-job.prompt_tokens // self.card.block_size)

    # -- admission --

    def paces(self, job: Job, healthy: list[Worker]) -> list[Pace]:
        """How fast each healthy worker would come to the job's first token."""
        matched = self.index.match(job.submit.block_keys)
        return [
            _pace(worker, job.prompt_tokens - matched.get(worker.id, 0) * worker.hello.card.block_size)
            for worker in healthy
        ]

    def ahead(self, tenant: str, priority: int) -> QueuePosition:
        """What waits before a new job of this tenant."""
        jobs = self.line.ahead(tenant, priority)
        share = jobs / len(self.line) if jobs else 0.0
        return QueuePosition(jobs, int(share * self.line.prompt_tokens), self.answer_tokens)

    def retry_after_s(self, healthy: list[Worker]) -> float:
        """When a place in a full line is likely: half the time that the whole line takes, 0.5 to 10 s."""
        paces = [_pace(worker, 0) for worker in healthy]
        whole = QueuePosition(len(self.line), self.line.prompt_tokens, self.answer_tokens)
        return min(max(wait_s(paces, whole) / 2, 0.5), 10.0)

    # -- what jobs cost --

    def charge(self, job: Job) -> None:
        """A job starts: its tenant is charged as if the answer were as long as it may be."""
        job.charged = job.prompt_tokens + job.submit.max_tokens
        self.line.tally.charge(job.tenant, job.charged)

    def settle(self, job: Job, cost: int) -> None:
        """A job left its worker: the charge becomes what it cost. Jobs that only a worker told of are nobody's."""
        if job.gateway_id is not None:
            self.line.tally.charge(job.tenant, cost - job.charged)
            job.charged = 0

    def learn(self, tokens: int) -> None:
        """A job's answer had this many tokens."""
        if not self.answer_tokens:
            self.answer_tokens = float(tokens)
        self.answer_tokens += ANSWER_SMOOTHING * (tokens - self.answer_tokens)


def _pace(worker: Worker, uncached_tokens: int) -> Pace:
    return Pace(
        credits=worker.hello.credits,
        free_credits=worker.free_credits,
        backlog_tokens=worker.backlog_tokens,
        uncached_tokens=uncached_tokens,
        prefill_rate=worker.last.prefill_rate,
        decode_s=worker.last.decode_s,
    )
