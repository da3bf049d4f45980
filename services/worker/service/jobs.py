"""The jobs of a worker and who listens to each: one engine job, any number of links. Lives on the event loop.

A job ends when the engine says so or when nobody listens any more.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from grpc import StatusCode

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.worker.job import Ended, EndReason, Job, StepOutput, TokenOut
from services.worker.service import codec
from services.worker.service.gateway_link import GatewayLink
from services.worker.service.metrics import WorkerMetrics
from services.worker.service.tracing import record_attach, record_job

log = structlog.get_logger("worker.jobs")

# How long an AttachJob waits for the job's own gateway to send it.
ATTACH_PATIENCE_S = 1.0
# How long the answer of an ended job can still be had: whoever was told to join it may come a moment too late.
RETENTION_S = 2.0
_NOT_FOUND = WeftError(StatusCode.UNAVAILABLE, "JOB_NOT_FOUND", "the generation to join is gone", retryable=True)
_REPLACED = WeftError(StatusCode.ABORTED, "ATTEMPT_REPLACED", "a later attempt replaced this one", retryable=True)
DRAINING = WeftError(StatusCode.UNAVAILABLE, "DRAINING", "the worker is leaving", retryable=True)


class EngineDoor(Protocol):
    """What this room needs of an engine; both calls may come from any thread."""

    def submit(self, job: Job) -> None:
        """Takes a job."""

    def cancel(self, key: int, position: int) -> None:
        """Ends a job; `position` tokens of its answer count."""


@dataclass(slots=True, eq=False)
class Running:
    """A job in the engine, all that it has said so far, and its listeners."""

    key: int
    job_id: str
    attempt: int
    prior: Sequence[int] = ()
    """Tokens of the answer that earlier attempts produced."""
    retold: bool = True
    """Others may be told these tokens: no log-probabilities, which are not known any more, belong to them."""
    prompt_tokens: int = 0
    """Tokens that the engine was given."""
    cacheable: bool = True
    """Its prompt may be found in the prefix cache."""
    traceparent: str = ""
    placement: int = 0
    """The scheduler's number for what sent it here; 0: sent ahead of that, and nobody else knows of it."""
    arrived: float = field(default_factory=time.monotonic)
    history: list[TokenOut] = field(default_factory=list)
    listeners: list[tuple["Listener", int]] = field(default_factory=list)
    last_listener: tuple["Listener", int] | None = None
    """Who cancelled it, and is still to be told what it cost."""
    ended: Ended | None = None

    @property
    def position(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included."""
        return len(self.prior) + len(self.history)

    def past(self, position: int) -> list[TokenOut]:
        """What was said of the answer from a position on. Raises WeftError if not all of it is known."""
        if position < len(self.prior) and not self.retold:
            raise _NOT_FOUND
        earlier = [TokenOut(self.key, place, token) for place, token in enumerate(self.prior)]
        return [token for token in (*earlier, *self.history) if token.position >= position]


Listener = GatewayLink[Running]
"""A link that listens to jobs."""


class Jobs:
    """All jobs of this worker."""

    def __init__(self, engine: EngineDoor, card: mesh.ModelCard, orphan_s: float, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._card = card
        self._orphan_s = orphan_s
        self._metrics = metrics
        self._keys = itertools.count(1)
        self._by_key: dict[int, Running] = {}
        self._by_id: dict[str, Running] = {}
        self._parked: dict[str, list[tuple[Listener, mesh.AttachJob]]] = defaultdict(list)
        self._ended: list[mesh.EndedJob] = []
        self.draining = False

    def start(self, link: Listener, message: mesh.Job) -> None:
        """Runs a job for `link`. A bad one is answered at once and disturbs nothing."""
        key, arrived = next(self._keys), time.monotonic()
        try:
            if self.draining:
                raise DRAINING
            job = codec.job_of(message, key, self._card)
        except WeftError as error:
            if message.placement:
                self._note_end(Running(key, message.job_id, message.attempt, placement=message.placement))
            link.end(codec.failed(message.row, error))
            return
        self._engine.submit(job)  # its thread awakes while the rest is noted, and what it says comes later
        running = Running(
            key,
            message.job_id,
            message.attempt,
            prior=job.token_ids[job.boundary :],
            retold=job.params.logprobs is None,
            prompt_tokens=len(job.token_ids),
            cacheable=not job.bypass_cache,
            traceparent=message.traceparent,
            placement=message.placement,
            arrived=arrived,
        )
        self._by_key[running.key] = running
        self._listen(running, link, message.row)
        if running.placement:
            self._publish(running)

    def confirm(self, link: Listener, message: mesh.ConfirmJob) -> None:
        """A job that was sent ahead is to run here: others of its id make way, and who waits to join it does."""
        running = link.rows.get(message.row)
        if running is None or running.placement:
            return
        running.placement = message.placement
        self._publish(running)
        if running.ended is not None:
            del link.rows[message.row]
            self._bury(running)

    def attach(self, link: Listener, message: mesh.AttachJob) -> None:
        """Lets `link` listen to a job from a position on; one that is not here yet is awaited."""
        running = self._by_id.get(message.job_id)
        if running is None:
            self._parked[message.job_id].append((link, message))
            asyncio.get_running_loop().call_later(ATTACH_PATIENCE_S, self._give_up, link, message)
            return
        record_attach(message.traceparent, running.traceparent)
        try:
            past = running.past(message.position)
        except WeftError as error:
            link.end(codec.failed(message.row, error))
            return
        link.tell_all(message.row, past)
        if running.ended is not None:
            link.end(_late_end(running.ended, message.row))
        else:
            self._listen(running, link, message.row)

    def cancel(self, link: Listener, message: mesh.CancelJob) -> None:
        """`link` needs the job no more; the last one to say so ends it."""
        running = link.rows.pop(message.row, None)
        if running is None:
            self._wait_no_more(link, message.row)
            return
        if running.ended is not None:  # It was sent ahead, and will not be confirmed.
            return
        running.listeners.remove((link, message.row))
        if not running.listeners:
            running.last_listener = (link, message.row)
            self._engine.cancel(running.key, message.position)

    def leave(self, link: Listener) -> None:
        """A link is gone. Its jobs run on for a while: their tokens may still be asked for."""
        self._wait_no_more(link)
        orphans = []
        for row, running in link.rows.items():
            if running.ended is not None:
                continue
            running.listeners.remove((link, row))
            if not running.placement:
                self._engine.cancel(running.key, 0)
            elif not running.listeners:
                orphans.append(running)
        link.rows.clear()
        if orphans:
            asyncio.get_running_loop().call_later(self._orphan_s, self._drop_orphans, orphans)

    def deliver(self, output: StepOutput, step_s: float | None = None) -> None:
        """Tells each link what a step brought to it; `step_s` is how long it took."""
        by_key = self._by_key
        first_tokens = 0
        for token in reversed(output.tokens):  # The last to come wait for their first tokens: theirs are told first.
            running = by_key.get(token.key)
            if running is None:
                continue
            first_tokens += not running.history
            running.history.append(token)
            for link, row in running.listeners:
                link.tell(row, token)
        for ended in output.ended:
            self._end(ended)
        self._metrics.stepped(step_s, len(output.tokens), first_tokens)

    def announce(self, keys: list[int]) -> None:
        """Tells each link that the next token of these jobs comes soon."""
        for key in keys:
            running = self._by_key.get(key)
            for link, row in running.listeners if running is not None else ():
                link.announce(row)

    def running(self) -> list[mesh.RunningJob]:
        """What runs, for the scheduler's hello."""
        jobs = (job for job in self._by_key.values() if job.placement)
        return [mesh.RunningJob(job_id=job.job_id, attempt=job.attempt) for job in jobs]

    def take_ended(self) -> list[mesh.EndedJob]:
        """Jobs that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def idle(self) -> bool:
        """No job runs."""
        return not self._by_key

    def _publish(self, running: Running) -> None:
        """From now on it is the job of its id."""
        older = self._by_id.get(running.job_id)
        if older is not None and older.ended is None:
            self._replace(older)
        self._by_id[running.job_id] = running
        for follower, attach in self._parked.pop(running.job_id, []):
            self.attach(follower, attach)

    def _listen(self, running: Running, link: Listener, row: int) -> None:
        running.listeners.append((link, row))
        link.rows[row] = running

    def _end(self, ended: Ended) -> None:
        running = self._by_key.pop(ended.key, None)
        if running is None:
            return
        running.ended = ended
        for link, row in running.listeners:
            link.end(codec.end_of(ended, row))
            if running.placement:
                link.rows.pop(row, None)
        running.listeners.clear()
        if running.last_listener is not None:
            link, row = running.last_listener
            link.end(codec.end_of(ended, row))
        if running.placement:
            self._bury(running)
        self._metrics.ended(ended, running.prompt_tokens, running.cacheable)
        record_job(
            ended,
            traceparent=running.traceparent,
            arrived=running.arrived,
            model=self._card.name,
            attempt=running.attempt,
            prompt_tokens=running.prompt_tokens,
        )

    def _bury(self, running: Running) -> None:
        """It has ended: the scheduler hears it, and who comes late may have the answer for a while."""
        asyncio.get_running_loop().call_later(RETENTION_S, self._forget, running)
        self._note_end(running)

    def _forget(self, running: Running) -> None:
        if self._by_id.get(running.job_id) is running:
            del self._by_id[running.job_id]

    def _note_end(self, running: Running) -> None:
        tokens, placement = len(running.history), running.placement
        end = mesh.EndedJob(job_id=running.job_id, attempt=running.attempt, tokens=tokens, placement=placement)
        self._ended.append(end)

    def _replace(self, older: Running) -> None:
        """Fences an older attempt: its listeners are told, and what it still brings reaches nobody."""
        for link, row in older.listeners:
            link.rows.pop(row, None)
            link.end(codec.failed(row, _REPLACED))
        older.listeners.clear()
        self._engine.cancel(older.key, older.position)

    def _wait_no_more(self, link: Listener, row: int | None = None) -> None:
        """A link, or one row of it, awaits no job that is yet to come."""
        for job_id, waiting in list(self._parked.items()):
            waiting[:] = [each for each in waiting if each[0] is not link or row not in (None, each[1].row)]
            if not waiting:
                del self._parked[job_id]

    def _give_up(self, link: Listener, message: mesh.AttachJob) -> None:
        waiting = self._parked.get(message.job_id, [])
        if (link, message) in waiting:
            waiting.remove((link, message))
            if not waiting:
                del self._parked[message.job_id]
            link.end(codec.failed(message.row, _NOT_FOUND))

    def _drop_orphans(self, orphans: list[Running]) -> None:
        for running in orphans:
            if not running.listeners and running.key in self._by_key:
                self._engine.cancel(running.key, running.position)


def _late_end(ended: Ended, row: int) -> mesh.JobEnd:
    """The end of a job for one who came late: a cancelled answer is not whole, so another attempt goes on from it."""
    end = codec.end_of(ended, row)
    if ended.reason is EndReason.CANCELLED:
        end.reason = api.FINISH_REASON_ERROR
        end.failure.CopyFrom(_NOT_FOUND.failure())
    return end
