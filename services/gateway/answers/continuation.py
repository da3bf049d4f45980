"""One continuation: asks for a worker, runs the job there, and continues elsewhere when the worker is lost.

The author of recovery, which is nothing but the next attempt at prompt and tokens so far. Knows no clients.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property

import structlog
from grpc import StatusCode

from protos import cache_pb2, mesh_pb2
from protos import inference_pb2 as api
from services import telemetry
from services.errors import WeftError
from services.gateway.answers.early_start import HeadStart
from services.gateway.answers.receipt import AttemptCosts
from services.gateway.backend import Backend
from services.gateway.links.result_cache import ResultKey, from_result, to_result
from services.gateway.links.scheduler_link import Placement
from services.gateway.links.worker_link import UNREAD, JobStream, lost_worker
from services.gateway.text.journal import Ending, Journal, KeyChain

log = structlog.get_logger("continuation")


class Continuation:
    """Sample i of a request."""

    def __init__(
        self,
        mesh: Backend,
        submission: Callable[[bytes], mesh_pb2.Submit],
        job: mesh_pb2.Job,
        journal: Journal,
        keys: KeyChain | None,
        question: ResultKey | None,
        policy: "api.CachePolicy.ValueType",
        likely: str,
        deadline: Callable[[], float],
        news: Callable[[], None],
    ) -> None:
        """`likely` is the address of the worker that will surely have its first attempt; empty if none is sure.

        `deadline` is when nobody waits for it any more as things stand, on the clock `time.monotonic`: who comes later
        may have more time.
        """
        self.journal = journal
        self.ledger = AttemptCosts()
        self.first_token_at: float | None = None
        self._mesh = mesh
        self._submission = submission
        self._job = job  # all but what changes from attempt to attempt
        self._traceparent = job.traceparent
        self._keys = keys
        self._question = question
        self._policy = policy
        self._likely = likely
        self._deadline = deadline
        self._job_deadline = math.inf  # as the worker was told
        self._news = news
        self._row: JobStream | None = None

    @property
    def soon(self) -> bool:
        """Its first token is about to come."""
        return self._row is not None and self._row.soon and self._row.first_at is None

    @property
    def greets(self) -> bool:
        """A worker has it, and has announced its first token, or will not: there is no better moment to greet."""
        return self._row is not None and (self._row.soon or not self._row.link.announces)

    @cached_property
    def _submit(self) -> mesh_pb2.Submit:
        """The job for the scheduler, made when a head start is on its way."""
        return self._submission(self._question.key if self._question is not None else b"")

    async def run(self) -> None:
        """Brings the answer to its end. Raises WeftError if there is none to be had."""
        self.journal.begin_attempt()
        with self._start_ahead() or nullcontext() as ahead:
            # A head start's job is written before anything else is done. All wait, so that of equal requests the one
            # that has it asks first, and the others join it.
            await asyncio.sleep(0)
            await self._answer(ahead)

    def advance(self) -> None:
        """Takes the tokens that have come into the journal; a stop string among them ends the job."""
        row = self._row
        if row is None or not row.tokens:
            return
        tokens, details = row.take()
        if self.first_token_at is None:
            self.first_token_at = row.first_at
        self.journal.extend(tokens, details)
        if self.journal.ending is not None:
            row.link.cancel(row, len(self.journal.tokens), self._mesh.settings.gateway_cost_wait_s)

    async def _answer(self, ahead: HeadStart | None) -> None:
        if self._question is None or not self._mesh.results.enabled:
            await self._generate(ahead)
        elif (result := await self._race(self._question, ahead)) is not None:
            self._replay(result)
            return
        self._store()

    async def _race(self, question: ResultKey, ahead: HeadStart | None) -> cache_pb2.CachedResult | None:
        """Generates and looks the result up at the same time: the result, if it came before the first token."""
        work = asyncio.create_task(self._generate(ahead))
        look = asyncio.create_task(self._look_up(question))
        try:
            await asyncio.wait({work, look}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:  # A hit also helps where no worker could.
                result = await look
                self.advance()
                if result is not None and not self.journal.tokens and self.journal.ending is None:
                    return result
            await work
            return None
        finally:
            work.cancel()
            look.cancel()
            await asyncio.gather(work, look, return_exceptions=True)

    async def _look_up(self, question: ResultKey) -> cache_pb2.CachedResult | None:
        await asyncio.sleep(0)  # The job, which takes longer, is written first.
        with telemetry.start("cache", self._traceparent, kind="client") as span:
            result = await self._mesh.results.get(question, span.traceparent)
            span.set({"weft.hit": result is not None})
            self._mesh.metrics.looked_up(self._submit.model, result is not None)
            return result

    def _replay(self, result: cache_pb2.CachedResult) -> None:
        tokens, details, ending = from_result(result)
        self.ledger.answered_by_cache()
        self.journal.attempt = 1
        self.first_token_at = time.monotonic() if tokens else None
        self.journal.extend(tokens, details)
        self.journal.end(ending)
        self._news()

    def _store(self) -> None:
        writes = self._policy in (api.CACHE_POLICY_UNSPECIFIED, api.CACHE_POLICY_READ_WRITE)
        ending = self.journal.ending
        if writes and self._question is not None and ending is not None and not self.ledger.joined:
            self._mesh.results.put(self._question, to_result(self.journal, ending))

    async def _generate(self, ahead: HeadStart | None) -> None:
        losses = unjoined = 0
        while self.journal.ending is None:
            placement, loss = await self._placed_attempt(ahead)
            if loss is None:
                return
            ahead = None
            losses += 1
            self._mesh.metrics.attempt_lost(loss)
            log.info("attempt lost", attempt=self.journal.attempt, reason=loss.reason, tokens=len(self.journal.tokens))
            if not loss.retryable or losses >= self._mesh.settings.gateway_max_attempts:
                raise loss
            # Those who lost one generation share the next one, too; whoever cannot join twice computes alone.
            if isinstance(placement, mesh_pb2.Joined) and loss.reason != lost_worker().reason:
                unjoined += 1
                self._submit.unjoinable = placement.leader_job_id
            if unjoined > 1:
                self._submit.identity = b""
            late = loss.code is StatusCode.DEADLINE_EXCEEDED  # That is no worker's fault.
            if loss.reason == lost_worker().reason or (isinstance(placement, mesh_pb2.Assigned) and not late):
                self._submit.avoid.append(placement.worker_id)
            if len(self.journal.tokens) >= self._job.sampling.max_tokens:
                self.journal.end(Ending(api.FINISH_REASON_LENGTH))
                self._news()
            else:
                self.journal.begin_attempt()

    async def _place(self) -> Placement:
        """A worker for the next attempt. Raises WeftError."""
        while True:
            deadline = self._deadline()
            try:
                return await self._mesh.dispatch.place(self._next_submit(deadline))
            except WeftError as error:
                if error.code is not StatusCode.DEADLINE_EXCEEDED or self._deadline() <= deadline:
                    raise

    def _next_submit(self, deadline: float) -> mesh_pb2.Submit:
        submit, context = self._submit, self.journal.context()
        submit.attempt = self.journal.attempt
        submit.prompt_tokens = len(context)
        submit.max_tokens = max(1, self._job.sampling.max_tokens - len(self.journal.tokens))
        submit.deadline_s = _remaining_s(deadline)
        if self._keys is not None:
            submit.block_keys = self._keys.extend_to(context)
        return submit

    def _start_ahead(self) -> HeadStart | None:
        """Sends the first attempt to where it will run, unless it is told soon enough anyway: where others of this
        gateway run, or where an answer is likely to come from the cache."""
        link = self._mesh.links.to(self._likely) if self._likely else None
        if link is None or not link.idle or self._mesh.results.expects(self._question):
            return None
        span = self._begin_span()
        return HeadStart(self._likely, link.run(self._next_job(), "", self._on_tokens), span)

    async def _placed_attempt(self, ahead: HeadStart | None) -> tuple[Placement, WeftError | None]:
        """One attempt where the scheduler wants it: None once the answer has ended, else why it has not."""
        placement = await self._place()
        self._note(placement)
        if ahead is not None and ahead.confirmed(placement):
            span, row = ahead.span, ahead.row
            self._news()  # Tokens may have come; if not, there is time to greet the client.
        else:
            span, row = self._begin_span(), None
        span.set({"weft.worker": placement.worker_id, "weft.joined": self.ledger.joined})
        with span:
            loss = await self._attempt(row or self._open(placement))
            span.set({"weft.tokens": len(self.journal.tokens)})
            if loss is not None:
                span.fail(loss.reason)
        return placement, loss

    def _note(self, placement: Placement) -> None:
        self.ledger.joined = isinstance(placement, mesh_pb2.Joined)
        queue_s = 0.0 if isinstance(placement, mesh_pb2.Joined) else placement.queue_s
        self.ledger.assigned(placement.worker_id, queue_s)

    def _begin_span(self) -> telemetry.Span:
        """The span of this attempt, of which its job will be a part."""
        attributes = {"weft.attempt": self.journal.attempt, "weft.sample_index": self._job.sample_index}
        span = telemetry.start("attempt", self._traceparent, kind="client", attributes=attributes)
        self._job.traceparent = span.traceparent
        return span

    async def _attempt(self, row: JobStream) -> WeftError | None:
        """One attempt on one worker: None once the answer has ended, else why it has not."""
        self._row = row
        try:
            await row.closed
        except asyncio.CancelledError:
            self._row = None  # What it still brings counts no more: the answer may have come from a cache.
            raise
        finally:
            row.link.cancel(row, len(self.journal.tokens))
        self.advance()
        self.ledger.add(row.end.cost if row.end is not None and row.end.HasField("cost") else row.spent())
        self._row = None
        if self.journal.ending is not None:
            return None
        return self._conclude(row)

    def _open(self, placement: Placement) -> JobStream:
        link = self._mesh.links.to(placement.address)
        if isinstance(placement, mesh_pb2.Joined):
            details = self._job.sampling.HasField("logprobs")
            position = len(self.journal.tokens)
            return link.attach(
                placement.leader_job_id, position, details, placement.worker_id, self._on_tokens, self._job.traceparent
            )
        return link.run(self._next_job(placement.placement), placement.worker_id, self._on_tokens)

    def _next_job(self, placement: int = 0) -> mesh_pb2.Job:
        job = mesh_pb2.Job()
        job.CopyFrom(self._job)
        job.attempt, job.placement = self.journal.attempt, placement
        job.token_ids.extend(self.journal.context())
        self._job_deadline = self._deadline()
        job.deadline_s = _remaining_s(self._job_deadline)
        return job

    def _on_tokens(self) -> None:
        row = self._row
        if row is not None and len(row.tokens) >= UNREAD:
            self.advance()  # No client reads: stop strings must be found nevertheless.
        self._news()

    def _conclude(self, row: JobStream) -> WeftError | None:
        end = row.end
        if end is None:
            return row.loss or lost_worker()
        if end.reason in (api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH):
            stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
            self.journal.end(Ending(end.reason, stop_token_id=stop_token_id))
            self._news()
            return None
        if end.reason == api.FINISH_REASON_ERROR and end.HasField("failure"):
            failure = WeftError.from_failure(end.failure)
            if failure.code is StatusCode.DEADLINE_EXCEEDED:  # The leader's, or of one who listens no more?
                failure.retryable = self.ledger.joined or self._deadline() > self._job_deadline
            return failure
        return lost_worker()  # It ended a job that nobody told it to end.


def _remaining_s(deadline: float) -> float:
    """Seconds until then, as messages say it: 0 for no deadline."""
    return 0.0 if math.isinf(deadline) else max(1e-3, deadline - time.monotonic())
