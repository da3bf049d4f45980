"""One model of the mesh: its card, its workers, the queue of its jobs. Knows no gateways and sends nothing."""

from services.scheduler.core.fairness import TokenCounters, WaitingQueue
from services.scheduler.core.forecast import QueuePosition, WorkerLoad, wait_s
from services.scheduler.core.lengths import AnswerLengths, Pace
from services.scheduler.core.messages import Card, Role, ServedModel, ServedWorker
from services.scheduler.core.placement import (
    WORTH_MOVING_BLOCKS,
    Candidate,
    Choice,
    PrefixIndex,
    choose_stages,
)
from services.scheduler.core.records import JobRecord, WorkerRecord

_TURNAROUND_S = 0.02
"""Time from the end of a job at a worker until another job gets there in its place: the worker reports every 10 ms, and
the other job's gateway sends it."""
_MOST_AHEAD = 0.5
"""Most jobs that a worker has ahead, as a share of its credits."""


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
        self.lengths = AnswerLengths()
        self.pace = Pace()

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
        workers = (
            ServedWorker(each.id, each.hello.address, each.hello.credits, each.listed_adapters, each.hello.role)
            for each in self.workers.values()
        )
        return ServedModel(self.card, tuple(sorted(workers, key=lambda worker: worker.address)))

    # -- placement --

    def has_room(self, workers: list[WorkerRecord]) -> bool:
        """Whether one of the workers may take a job: it has a free credit, or takes jobs ahead, and, where roles divide
        the work, is not one for prompts, whose jobs need a second credit."""
        free = [worker.hello.role for worker in workers if worker.room > -self._ahead(worker)]
        if free.count(Role.PREFILL) < len(free):
            return True
        return bool(free) and all(worker.hello.role is Role.PREFILL for worker in workers)

    def choose_worker(self, job: JobRecord, workers: list[WorkerRecord]) -> Choice | None:
        """The best with a free credit of the workers that are open to a job, or the best that takes jobs ahead if none
        has; None if the job must wait.

        A job with an adapter rather goes to a worker in whose device memory it is. A suspect stays at one worker.
        """
        free = any(worker.room > 0 for worker in workers)
        candidates = [
            Candidate(
                w.id, w.backlog_blocks, len(w.jobs), w.is_cold(job), w.hello.role,
                w.room > (0 if free else -self._ahead(w)),
            )
            for w in workers
        ]  # fmt: skip
        matched = self.index.match(job.submit.block_keys)
        divisible = job.submit.divisible and not job.need.suspect
        choice = choose_stages(candidates, self.blocks(job), matched, divisible)
        return choice and choice._replace(source=self._source(choice, workers, matched))

    def _ahead(self, worker: WorkerRecord) -> int:
        """How many jobs more than its credits a worker takes: as many as it ends in the time that a credit takes to
        come back with another job, so that it never runs fewer than it can. For long answers that is none."""
        residence_s = self.lengths.mean * worker.last_report.decode_s * self.pace.factor
        if not residence_s or worker.hello.role is not Role.BOTH:
            return 0
        return int(worker.hello.credits * min(_TURNAROUND_S / residence_s, _MOST_AHEAD))

    def _source(self, choice: Choice, workers: list[WorkerRecord], matched: dict[str, int]) -> str:
        """host:port of the worker that holds the most of a prompt, if that is worth fetching."""
        best = max(workers, key=lambda worker: matched.get(worker.id, 0), default=None)
        if best is None or matched.get(best.id, 0) < choice.matched_blocks + WORTH_MOVING_BLOCKS:
            return ""
        return best.hello.address

    def blocks(self, job: JobRecord) -> int:
        """Blocks of a job's prompt, including a partial last one."""
        assert self.card is not None, self
        return -(-job.prompt_tokens // self.card.block_size)

    # -- forecasts --

    def loads(self, job: JobRecord, healthy: list[WorkerRecord]) -> list[WorkerLoad]:
        """The load of each healthy worker, and what it would have to compute for the job's prompt."""
        matched = self.index.match(job.submit.block_keys)
        return [
            self._load(worker, job.prompt_tokens - matched.get(worker.id, 0) * worker.hello.card.block_size)
            for worker in healthy
        ]

    def queue_position(self, tenant: str, priority: int) -> QueuePosition:
        """What would wait before a new job of this tenant."""
        jobs = self.queue.jobs_before(tenant, priority)
        share = jobs / len(self.queue) if jobs else 0.0
        return QueuePosition(jobs, int(share * self.queue.prompt_tokens), self.lengths.mean)

    def express_position(self, priority: int) -> QueuePosition:
        """What would be served before a new job in the express lane."""
        jobs = self.queue.jobs_before_express(priority)
        share = min(1.0, jobs / len(self.queue)) if jobs and self.queue else 0.0
        return QueuePosition(jobs, int(share * self.queue.prompt_tokens), self.lengths.mean)

    def answer_tokens(self, job: JobRecord) -> float:
        """The likely length of a job's answer."""
        return self.lengths.expected(job.tenant, job.submit.max_tokens)

    def wait_s(
        self, loads: list[WorkerLoad], healthy: list[WorkerRecord], position: QueuePosition, now: float
    ) -> float:
        """Seconds until a job at this position gets a credit, by when the running jobs began: they may end together."""
        rough_s = wait_s(loads, position)
        if not rough_s or not position.answer_tokens:
            return rough_s
        token_s = min(load.decode_s for load in loads)
        each_s = position.answer_tokens * token_s
        place = position.jobs // len(healthy)
        decoding_s = min(worker.credit_free_s(place, each_s, token_s, now) for worker in healthy)
        return max(decoding_s, wait_s(loads, position._replace(answer_tokens=0.0)))

    def retry_after_s(self, healthy: list[WorkerRecord]) -> float:
        """When a full queue is likely to have room: half the time that the whole queue takes, 0.5 to 10 s."""
        loads = [self._load(worker, 0) for worker in healthy]
        whole = QueuePosition(len(self.queue), self.queue.prompt_tokens, self.lengths.mean)
        return min(max(wait_s(loads, whole) / 2, 0.5), 10.0)

    def record_end(self, job: JobRecord, tokens: int, now: float) -> None:
        """Learns the length and the duration of a job that ended at its worker with `tokens` new tokens."""
        self.lengths.add(job.tenant, tokens)
        worker = job.worker
        if worker is not None and job.gateway_id is not None and tokens:
            uncached = job.prompt_tokens - job.matched_blocks * worker.hello.card.block_size
            report = worker.last_report
            prefill_s = uncached / report.prefill_rate if report.prefill_rate else 0.0
            self.pace.add(prefill_s + tokens * report.decode_s, now - job.assigned_at)
        if worker is not None:
            worker.begin_next(now)

    def _load(self, worker: WorkerRecord, uncached_tokens: int) -> WorkerLoad:
        return WorkerLoad(
            credits=worker.hello.credits,
            free_credits=worker.free_credits,
            backlog_tokens=worker.backlog_tokens,
            uncached_tokens=uncached_tokens,
            prefill_rate=worker.last_report.prefill_rate,
            decode_s=worker.last_report.decode_s * self.pace.factor,
        )

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
