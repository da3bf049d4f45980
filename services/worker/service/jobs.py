"""The jobs of a worker and their subscribers: one engine job, any number of links. Lives on the event loop.

A job ends when the engine ends it or when its last subscriber leaves.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Protocol

import structlog
from grpc import StatusCode

from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid
from services.hashing import KEY_BYTES, split_keys
from services.worker.job import Adapter, Ended, Job, StepOutput
from services.worker.service import codec
from services.worker.service.adapters import NOT_LOADED, Adapters
from services.worker.service.job_record import JobRecord, JobState, Subscriber
from services.worker.service.joins import WaitingJoins, join
from services.worker.service.metrics import WorkerMetrics
from services.worker.service.tracing import record_job

log = structlog.get_logger("worker.jobs")

RETENTION_S = 2.0
"""How long the answer of an ended job is kept for requests that the scheduler sent to join it."""
_REPLACED = WeftError(StatusCode.ABORTED, "ATTEMPT_REPLACED", "a later attempt replaced this one", retryable=True)
_IN_USE = WeftError(
    StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "another request with this id is in flight", field="request_id"
)
DRAINING = WeftError(StatusCode.UNAVAILABLE, "DRAINING", "the worker is leaving", retryable=True)


class JobEngine(Protocol):
    """The part of an engine that Jobs uses. Its methods may be called from any thread."""

    def submit(self, job: Job) -> None:
        """Queues a job."""

    def cancel(self, key: int, position: int) -> None:
        """Ends a job; the first `position` tokens of its answer count."""

    def prefetch(self, source: str, keys: Sequence[bytes]) -> None:
        """Fetches blocks that the worker at `source` computes."""


class Jobs:
    """All jobs of this worker."""

    def __init__(
        self,
        engine: JobEngine,
        card: mesh.ModelCard,
        orphan_s: float,
        metrics: WorkerMetrics,
        adapters: Adapters | None = None,
    ) -> None:
        """`orphan_s`: how long a job runs on after its last link broke. `adapters`: those that jobs may name."""
        self._adapters = adapters
        self._engine = engine
        self._card = card
        self._orphan_s = orphan_s
        self._metrics = metrics
        self._keys = itertools.count(1)
        self._by_key: dict[int, JobRecord] = {}
        self._by_id: dict[str, JobRecord] = {}
        """Confirmed jobs, also for RETENTION_S after their end."""
        self._joins = WaitingJoins()
        self._ended: list[mesh.EndedJob] = []
        self.draining = False

    def start(self, link: Subscriber, message: mesh.Job) -> None:
        """Runs a job for `link`. An invalid job is answered with an error and affects no other."""
        key, arrived = next(self._keys), time.monotonic()
        state = JobState.TENTATIVE if message.tentative else JobState.CONFIRMED
        try:
            if self.draining:
                raise DRAINING
            job = codec.job_of(message, key, self._card, self._adapter(message.adapter))
        except WeftError as error:
            if state is JobState.CONFIRMED:
                self._report_end(JobRecord(key, message.job_id, message.attempt, placement=message.placement))
            link.send_end(codec.failed(message.stream_id, error))
            return
        prior = list(job.token_ids[job.prompt_len :])
        if not message.tentative and not message.placement:
            other = self._of_another(link, message.job_id)
            if other is not None and _share(other, job, prior, link, message.stream_id, message.traceparent):
                return
        self._engine.submit(job)  # First: its thread wakes up while this one makes the record.
        record = JobRecord(
            key,
            message.job_id,
            message.attempt,
            state=state,
            placement=message.placement,
            request=job,
            prior=prior,
            replayable=job.params.logprobs is None,
            joinable=job.params.prompt_logprobs is None,
            prompt_tokens=len(job.token_ids),
            cacheable=not job.bypass_cache,
            traceparent=message.traceparent,
            arrived=arrived,
        )
        self._by_key[key] = record
        record.subscribe(link, message.stream_id)
        if record.confirmed:
            self._publish(record)

    def _adapter(self, fingerprint: bytes) -> Adapter | None:
        """The adapter of a job; None for a job without one. Raises WeftError."""
        if not fingerprint:
            return None
        if self._adapters is None:
            raise NOT_LOADED
        return self._adapters.find(fingerprint)

    def confirm(self, link: Subscriber, message: mesh.ConfirmJob) -> None:
        """Makes a tentative job the job of its id: it replaces an older one, and waiting requests join it."""
        record = link.streams.get(message.stream_id)
        if record is None or record.confirmed or (not message.placement and self._given_up(link, message, record)):
            return
        record.state, record.placement = JobState.CONFIRMED, message.placement
        self._publish(record)
        if record.ended is not None:
            del link.streams[message.stream_id]
            self._retire(record)

    def prefetch(self, message: mesh.Prefetch) -> None:
        """Announces blocks of a job that another worker will hand off to this one. Raises WeftError."""
        if len(message.block_keys) % KEY_BYTES:
            raise invalid("prefetch.block_keys", f"must be a list of {KEY_BYTES}-byte keys")
        self._engine.prefetch(message.source, list(split_keys(message.block_keys)))

    def attach(self, link: Subscriber, message: mesh.AttachJob) -> None:
        """Subscribes `link` to a job from a position on. Waits for a job that has not arrived yet."""
        record = self._by_id.get(message.job_id)
        if record is None:
            self._joins.add(link, message)
        else:
            join(record, link, message)

    def cancel(self, link: Subscriber, message: mesh.CancelJob) -> None:
        """Ends a subscription, and the job with its last one."""
        record = link.streams.pop(message.stream_id, None)
        if record is None:
            self._joins.discard(link, message.stream_id)
            return
        if record.ended is not None:  # A tentative job that will not be confirmed.
            return
        record.subscribers.remove((link, message.stream_id))
        if not record.subscribers:
            record.cancelled_by = (link, message.stream_id)
            self._engine.cancel(record.key, message.position)

    def leave(self, link: Subscriber) -> None:
        """A link broke. Its confirmed jobs run on for `orphan_s`, so that a retry can join them."""
        self._joins.discard(link)
        orphans = []
        for stream_id, record in link.streams.items():
            if record.ended is not None:
                continue
            record.subscribers.remove((link, stream_id))
            if not record.confirmed:
                self._engine.cancel(record.key, 0)
            elif not record.subscribers:
                orphans.append(record)
        link.streams.clear()
        if orphans:
            asyncio.get_running_loop().call_later(self._orphan_s, self._cancel_orphans, orphans)

    def deliver(self, output: StepOutput, step_s: float | None = None) -> None:
        """Sends the output of a step to the subscribers; `step_s` is the duration of the step."""
        by_key = self._by_key
        first_tokens = 0
        for scores in output.scores:
            scored = by_key.get(scores.key)
            for link, stream_id in scored.subscribers if scored is not None else ():
                link.send_scores(stream_id, scores)
        for token in output.tokens:  # First tokens come first: the engine's thread has sorted them.
            record = by_key.get(token.key)
            if record is None:
                continue
            first_tokens += not record.token_ids
            record.add(token)
            for link, stream_id in record.subscribers:
                link.send_token(stream_id, token)
        for ended in output.ended:
            self._end(ended)
        counts = step_s, len(output.tokens), first_tokens, sum(output.extra)
        asyncio.get_running_loop().call_soon(self._metrics.stepped, *counts)  # after the links have written

    def running(self) -> list[mesh.RunningJob]:
        """The confirmed jobs that run, for the hello to the scheduler."""
        records = (record for record in self._by_key.values() if record.confirmed)
        return [mesh.RunningJob(job_id=record.job_id, attempt=record.attempt) for record in records]

    def take_ended(self) -> list[mesh.EndedJob]:
        """The confirmed jobs that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def idle(self) -> bool:
        """No job runs."""
        return not self._by_key

    def _of_another(self, link: Subscriber, job_id: str) -> JobRecord | None:
        """The running job of this id, if another gateway has it. A gateway's later attempt replaces its earlier one."""
        running = self._by_id.get(job_id)
        if running is None or running.ended is not None or any(each is link for each, _ in running.subscribers):
            return None
        return running

    def _given_up(self, link: Subscriber, message: mesh.ConfirmJob, record: JobRecord) -> bool:
        """Whether a tentative job that no scheduler placed is given up for the one that another gateway has here."""
        other = self._of_another(link, record.job_id)
        if other is None or record.request is None:
            return False
        answer = [*record.prior, *record.token_ids]
        if record.ended is not None:
            del link.streams[message.stream_id]
            return True
        if not _share(other, record.request, answer, link, message.stream_id, record.traceparent):
            return False
        record.subscribers.remove((link, message.stream_id))
        self._engine.cancel(record.key, record.position)
        return True

    def _publish(self, record: JobRecord) -> None:
        """Makes it the job of its id."""
        older = self._by_id.get(record.job_id)
        if older is not None and older.ended is None:
            self._replace(older)
        self._by_id[record.job_id] = record
        for link, message in self._joins.take(record.job_id):
            join(record, link, message)

    def _end(self, ended: Ended) -> None:
        record = self._by_key.pop(ended.key, None)
        if record is None:
            return
        record.ended = ended
        for link, stream_id in record.subscribers:
            link.send_end(codec.end_of(ended, stream_id, record.handed_off))
            if record.confirmed:
                link.streams.pop(stream_id, None)
        record.subscribers.clear()
        if record.cancelled_by is not None:
            link, stream_id = record.cancelled_by
            link.send_end(codec.end_of(ended, stream_id))
        if record.confirmed:
            self._retire(record)
        asyncio.get_running_loop().call_soon(self._account, record, ended)  # after the links have written

    def _account(self, record: JobRecord, ended: Ended) -> None:
        """Counts a job that has ended, and records its spans."""
        self._metrics.ended(ended, record.prompt_tokens, record.cacheable)
        record_job(
            ended,
            traceparent=record.traceparent,
            arrived=record.arrived,
            model=self._card.name,
            attempt=record.attempt,
            prompt_tokens=record.prompt_tokens,
        )

    def _retire(self, record: JobRecord) -> None:
        """Reports the end of a job to the scheduler, and keeps its answer for RETENTION_S."""
        asyncio.get_running_loop().call_later(RETENTION_S, self._forget, record)
        self._report_end(record)

    def _forget(self, record: JobRecord) -> None:
        if self._by_id.get(record.job_id) is record:
            del self._by_id[record.job_id]

    def _report_end(self, record: JobRecord) -> None:
        tokens, placement = len(record.token_ids), record.placement
        end = mesh.EndedJob(job_id=record.job_id, attempt=record.attempt, tokens=tokens, placement=placement)
        end.handed_off = record.handed_off
        self._ended.append(end)

    def _replace(self, older: JobRecord) -> None:
        """Ends an older attempt: its subscribers receive an error, and none of its further tokens."""
        for link, stream_id in older.subscribers:
            link.streams.pop(stream_id, None)
            link.send_end(codec.failed(stream_id, _REPLACED))
        older.subscribers.clear()
        self._engine.cancel(older.key, older.position)

    def _cancel_orphans(self, orphans: list[JobRecord]) -> None:
        for record in orphans:
            if not record.subscribers and record.key in self._by_key:
                self._engine.cancel(record.key, record.position)


def _share(running: JobRecord, job: Job, answer: list[int], link: Subscriber, stream_id: int, traceparent: str) -> bool:
    """Whether a job that no scheduler placed, and that has these tokens, needs no further ones from the engine.

    As a scheduler would do, it joins the running job if that is the same request, and is refused if it is not.
    """
    if not running.same_request(job):
        link.streams.pop(stream_id, None)
        link.send_end(codec.failed(stream_id, _IN_USE))
        return True
    if not running.continues(answer):
        return False
    join(running, link, mesh.AttachJob(stream_id=stream_id, position=len(answer), traceparent=traceparent))
    return True
