"""The jobs of an engine, from their arrival to their end. Knows the planner, and what else remembers jobs; no steps."""

import logging
import math
import time
from collections.abc import Callable

from services.worker.engine.acceptance import ending_at_arrival
from services.worker.engine.active_job import ActiveJob
from services.worker.engine.inbox import Arrival, Cancel
from services.worker.engine.prefixes import Prefixes
from services.worker.engine.scored_prompts import ScoredPrompts
from services.worker.engine.structured import StructuredJobs
from services.worker.job import Ended, EndReason, Failure, StepOutput
from services.worker.kvcache.pool import KvPool
from services.worker.planner.planner import Planner, Row
from services.worker.planner.sequence import Sequence

log = logging.getLogger(__name__)

_NUMERIC = Failure("INTERNAL", "NUMERIC", "the model computed numbers that are not finite for this request")
_INTERNAL = Failure("INTERNAL", "INTERNAL", "the engine failed to compute this request", retryable=True)


class JobTable:
    """The jobs that have arrived and have not ended, by key. Lives on the engine's thread."""

    def __init__(
        self,
        planner: Planner,
        prefixes: Prefixes,
        scored: ScoredPrompts,
        structured: StructuredJobs,
        kv: KvPool | None,
        ended: Callable[[Sequence], None],
        longest: int,
        end_tokens: frozenset[int],
    ) -> None:
        """ended: called with each job that ends. longest: most tokens of a sequence. end_tokens: end an answer."""
        self._planner, self._prefixes, self._scored, self._structured = planner, prefixes, scored, structured
        self._kv, self._ended, self._longest, self._end_tokens = kv, ended, longest, end_tokens
        self._jobs: dict[int, ActiveJob] = {}
        self._next_deadline_s = math.inf
        """No job has an earlier one."""
        self.fingerprint = b""
        """Of the model: the keys of blocks begin with it."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, key: int) -> ActiveJob:
        return self._jobs[key]

    def get(self, key: int) -> ActiveJob | None:
        """The job with this key; None if it has ended."""
        return self._jobs.get(key)

    def of(self, row: Row, preemptions: int) -> ActiveJob | None:
        """The job of a row in flight; None if it ended or was paused meanwhile."""
        sequence = row.sequence
        job = self._jobs.get(sequence.job.key)
        return None if job is None or job.sequence is not sequence or sequence.preemptions != preemptions else job

    def accept(self, arrival: Arrival, output: StepOutput) -> None:
        """Put a job into the waiting queue, or end it if it cannot run."""
        job, longest = arrival.job, self._longest
        assert job.key not in self._jobs, f"a job with key {job.key} is running"
        sequence = Sequence(job, arrival.number, self._planner.block_size, longest, self.fingerprint)
        cancelled = self._structured.arrived(job.key)
        matcher = None if isinstance(arrival.form, Failure) else arrival.form
        active = self._jobs[job.key] = ActiveJob(sequence, arrival.at, self._end_tokens, matcher)
        self._next_deadline_s = min(self._next_deadline_s, active.deadline_s)
        self._planner.add(sequence)
        self._scored.add(job)
        if cancelled:
            self.end(active, EndReason.CANCELLED, output)
            return
        ending = ending_at_arrival(sequence, arrival.form, self._planner, longest)
        if ending is None:
            self._prefixes.consider(sequence)
        else:
            self.end(active, ending.reason, output, error=ending.error)

    def cancel(self, message: Cancel, output: StepOutput) -> None:
        """End a job that its client does not want any more, also before it has arrived."""
        job = self._jobs.get(message.key)
        if job is None:
            self._structured.cancel(message.key)
            return
        if message.position is not None:
            self._planner.cut(job.sequence, job.job.prompt_len + message.position)
        self.end(job, EndReason.CANCELLED, output)

    def end_expired(self, output: StepOutput) -> None:
        """End the jobs whose deadlines are over."""
        now = time.monotonic()
        if now < self._next_deadline_s:
            return
        for job in [job for job in self._jobs.values() if job.deadline_s <= now]:
            self.end(job, EndReason.DEADLINE, output)
        self._next_deadline_s = min((job.deadline_s for job in self._jobs.values()), default=math.inf)

    def fail(self, job: ActiveJob, error: Exception | None, output: StepOutput) -> None:
        """End one job with an error. Blocks that it alone has are zeroed: no other job may find or reuse them as they
        are. error: what its launch raised; None: its numbers are not finite."""
        if error is not None:  # The text of an exception may quote the request.
            log.error("job %d failed: %s", job.job.key, type(error).__name__)
        own = job.sequence.blocks[job.sequence.published :]
        if own and self._kv is not None:
            self._kv.scrub(own)
        self.end(job, EndReason.ERROR, output, error=_NUMERIC if error is None else _INTERNAL)

    def end(
        self,
        job: ActiveJob,
        reason: EndReason,
        output: StepOutput,
        stop_token_id: int | None = None,
        error: Failure | None = None,
    ) -> None:
        """A job has ended: nothing here remembers it any more, and the output of the step reports it."""
        key, sequence = job.job.key, job.sequence
        self._scored.forget(key)
        self._prefixes.forget(sequence)
        self._ended(sequence)
        self._planner.remove(sequence)
        del self._jobs[key]
        output.ended.append(Ended(key, reason, sequence.position, job.cost(time.monotonic()), stop_token_id, error))
