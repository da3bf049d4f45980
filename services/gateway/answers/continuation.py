"""One continuation: submits the job, runs attempts until the answer has ended, and uses the result cache.

The author of recovery, which is the next attempt at prompt and tokens so far. Knows no clients.
"""

import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace

import structlog
from grpc import StatusCode

from protos import cache_pb2
from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import telemetry
from services.errors import WeftError
from services.gateway.answers import handoff
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.attempt import Answer, Attempt
from services.gateway.answers.early_attempt import EarlyAttempt, early_link
from services.gateway.answers.job_messages import JobMessages
from services.gateway.answers.receipt import AttemptCosts
from services.gateway.answers.retry_policy import RetryPolicy, RetryState
from services.gateway.backend import Backend
from services.gateway.links.result_cache import ResultKey, from_result, to_result
from services.gateway.links.scheduler_link import Placement
from services.gateway.links.worker_link import UNREAD_TOKENS, JobStream
from services.gateway.text.journal import Ending, Journal

log = structlog.get_logger("continuation")

_PROBATION = 4
"""Tokens of a suspect that its gateway waits for if the last attempt died after its first tokens: some of these may
have been lost with the worker, so that the next attempt repeats them before it dies again."""
NOTICE_S = 5.0
"""Time between two messages to the clients of an interrupted answer that waits for a worker."""


class Continuation:
    """One sample of a request."""

    __slots__ = (
        "_admitted", "_answer", "_attempt", "_backend", "_key", "_messages", "_retries", "_retry",
        "_suspect_until",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, admitted: AdmittedRequest, answer: Answer, messages: JobMessages, key: ResultKey | None
    ) -> None:
        """`key` of the result, if it may be read from the cache."""
        self._backend = backend
        self._admitted = admitted
        self._answer = answer
        self._messages = messages
        self._key = key
        self._retries = RetryPolicy(backend.settings.gateway_max_attempts)
        self._retry = RetryState()
        self._suspect_until: int | None = None
        """Number of tokens after which its attempt has survived its probation; None if it is on none."""
        self._attempt: Attempt | None = None
        """The confirmed attempt that runs now."""

    @property
    def journal(self) -> Journal:
        """Its tokens and text so far."""
        return self._answer.journal

    @property
    def costs(self) -> AttemptCosts:
        """Its costs so far."""
        return self._answer.costs

    @property
    def first_token_at(self) -> float | None:
        """When its first token arrived, on `time.monotonic`."""
        return self._answer.first_token_at

    @property
    def placed(self) -> bool:
        """The scheduler has placed it, and an attempt runs there."""
        return self._attempt is not None

    async def run(self) -> None:
        """Produces the whole answer. Raises WeftError."""
        self.journal.begin_attempt()
        with self._early_attempt() or nullcontext() as early:
            # The early attempt's job is written before anything else happens. Continuations without one yield, too, so
            # that of equal requests the one that has it is submitted first, and the others join it.
            await asyncio.sleep(0)
            await self._run(early)

    def advance(self) -> None:
        """Moves the tokens that have arrived to the journal."""
        if self._attempt is not None:
            self._attempt.advance()

    async def _run(self, early: EarlyAttempt[Attempt] | None) -> None:
        if self._key is None or not self._backend.results.enabled:
            await self._generate(early)
        elif (result := await self._race(self._key, early)) is not None:
            self._replay(result)
            return
        self._store()

    async def _race(self, key: ResultKey, early: EarlyAttempt[Attempt] | None) -> cache_pb2.CachedResult | None:
        """Generates and looks the result up at the same time. -> the result, if it arrived before the first token."""
        work = asyncio.create_task(self._generate(early))
        look_up = asyncio.create_task(self._look_up(key))
        try:
            await asyncio.wait({work, look_up}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:  # A hit also replaces an answer that failed.
                result = await look_up
                self.advance()
                if result is not None and not self.journal.tokens and self.journal.ending is None:
                    # From here on no token of the attempt may reach the journal, which the result fills: clients that
                    # were notified in this turn of the loop still call `advance` before the attempt is cancelled.
                    self._attempt = None
                    return result
            await work
            return None
        finally:
            work.cancel()
            look_up.cancel()
            await asyncio.gather(work, look_up, return_exceptions=True)

    async def _look_up(self, key: ResultKey) -> cache_pb2.CachedResult | None:
        await asyncio.sleep(0)  # Submits the job first, which takes longer.
        with telemetry.start("cache", self._admitted.traceparent, kind="client") as span:
            result = await self._backend.results.get(key, span.traceparent)
            span.set({"weft.hit": result is not None})
            self._backend.metrics.looked_up(self._admitted.served.card.name, result is not None)
            return result

    def _replay(self, result: cache_pb2.CachedResult) -> None:
        assert not self.journal.tokens, "a result replaces no tokens"
        tokens, details, ending = from_result(result)
        self.costs.answered_by_cache()
        self.journal.attempt = 1
        if tokens:
            self._answer.first_token(time.monotonic())
        self.journal.extend(tokens, details)
        self._answer.end(ending)

    def _store(self) -> None:
        writes = self._admitted.request.cache in (api.CACHE_POLICY_UNSPECIFIED, api.CACHE_POLICY_READ_WRITE)
        ending = self.journal.ending
        if writes and self._key is not None and ending is not None and not self.costs.joined:
            self._backend.results.put(self._key, to_result(self.journal, ending))

    async def _generate(self, early: EarlyAttempt[Attempt] | None) -> None:
        """Runs attempts until the answer has ended. Raises WeftError."""
        while self.journal.ending is None:
            placement = await self._place()
            self.costs.assigned(placement.worker_id, placement.queue_s if isinstance(placement, mesh.Assigned) else 0.0)
            second = handoff.second_stage(placement)
            if second is None:
                await self._run_stage(placement, early)
            elif await self._begin_elsewhere(placement, second, early):
                await self._run_stage(second, None)
            early = None

    async def _begin_elsewhere(self, first: Placement, second: Placement, early: EarlyAttempt[Attempt] | None) -> bool:
        """Runs an attempt up to the first token, while the worker of the second stage fetches what the first one
        computes. -> whether there is a second stage: not if the answer has ended or the attempt is lost."""
        needed = False
        try:
            self._announce(first, second)
            handed_off = await self._run_stage(first, early)
            needed = self.journal.ending is None  # Also by the next attempt, which replaces a lost one.
        finally:
            if not needed and isinstance(first, mesh.Assigned):
                self._backend.scheduler.withdraw(self._messages.job_id)
        return handed_off

    def _announce(self, first: Placement, second: Placement) -> None:
        """Names the blocks that the worker of the second stage will need."""
        if isinstance(first, mesh.Assigned):
            keys = self._messages.block_keys(self.journal)
            self._backend.workers.to(second.address).prefetch(first.address, keys)

    async def _run_stage(self, placement: Placement, early: EarlyAttempt[Attempt] | None) -> bool:
        """Runs the part of an attempt that one worker has, and prepares the next attempt if that is lost. -> whether
        the worker handed the answer off. Raises WeftError if there is to be no other attempt."""
        before = len(self.journal.tokens)
        attempt = self._open_attempt(placement, early)
        self._watch_probation(placement)
        loss = await self._run_attempt(attempt, placement)
        if loss is None and attempt.handed_off:
            if placement.HasField("handoff"):
                return True
            loss = handoff.HANDED_OFF
        if loss is not None:
            broken = attempt.stream.broken or (early is not None and early.attempt.stream.broken)
            self._prepare_retry(loss, placement, before if broken else None)
        return False

    async def _place(self) -> Placement:
        """The placement of the next attempt. Raises WeftError."""
        if not self.journal.tokens:  # Its client may still be refused.
            return await self._submit()
        notices = asyncio.create_task(self._report_wait())
        try:
            return await self._submit()
        finally:
            notices.cancel()

    async def _report_wait(self) -> None:
        """Informs the clients, who have part of the answer, that it waits for a worker."""
        while True:
            await asyncio.sleep(NOTICE_S)
            self.journal.waits += 1
            self._answer.notify()

    async def _submit(self) -> Placement:
        while True:
            deadline = self._answer.deadline()
            try:
                return await self._backend.scheduler.submit(self._messages.submit(self.journal, deadline, self._retry))
            except WeftError as error:
                extended = self._answer.deadline() > deadline
                if error.code is not StatusCode.DEADLINE_EXCEEDED or not extended:
                    raise

    def _early_attempt(self) -> EarlyAttempt[Attempt] | None:
        """Sends the first attempt before the scheduler's answer, where that is likely to be this worker."""
        link = early_link(self._backend, self._admitted.served, lambda: self._messages.fingerprint)
        if link is None:
            return None
        span, deadline = self._begin_span(), self._answer.deadline()
        job = self._messages.job(self.journal, deadline, span.traceparent, None)
        stream = link.run(job, "", self._on_tokens, self._answer.hold_s)
        return EarlyAttempt(Attempt(self._answer, stream, span, deadline))

    def _open_attempt(self, placement: Placement, early: EarlyAttempt[Attempt] | None) -> Attempt:
        """The attempt at this placement: the early one if it is there, else a new one."""
        joined = isinstance(placement, mesh.Joined)
        self.costs.continued(placement.worker_id)
        self.costs.joined = joined
        if early is not None and early.confirm(placement):
            attempt = early.attempt
        else:
            span, deadline = self._begin_span(), self._answer.deadline()
            attempt = Attempt(self._answer, self._open(placement, deadline, span.traceparent), span, deadline)
            early = None
        attempt.span.set({"weft.worker": placement.worker_id, "weft.joined": joined})
        self._attempt = attempt
        if early is not None:
            self._answer.notify()  # Tokens may have arrived; if not, there is time to accept the call.
        return attempt

    def _open(self, placement: Placement, deadline: float, traceparent: str) -> JobStream:
        link, journal, messages = self._backend.workers.to(placement.address), self.journal, self._messages
        notify, hold_s = self._on_tokens, self._answer.hold_s
        if isinstance(placement, mesh.Joined):
            attach = messages.attach(journal, placement.leader_job_id, traceparent)
            return link.attach(attach, placement.worker_id, messages.wants_details, notify, hold_s)
        job = messages.job(journal, deadline, traceparent, placement.placement)
        job.handoff, job.source = placement.HasField("handoff"), placement.source
        return link.run(job, placement.worker_id, notify, hold_s)

    async def _run_attempt(self, attempt: Attempt, placement: Placement) -> WeftError | None:
        """-> None once the answer has ended, else why it has not."""
        with attempt.span as span:
            try:
                loss = await attempt.run()
            finally:
                self._attempt = None  # Its further tokens do not count: the answer may come from the cache.
            span.set({"weft.tokens": len(self.journal.tokens)})
            if loss is not None:
                span.fail(loss.reason)
        return loss

    def _watch_probation(self, placement: Placement) -> None:
        """Notes after how many tokens an attempt is no longer suspected to kill its worker."""
        self._suspect_until = None
        if isinstance(placement, mesh.Assigned) and placement.probation:
            self._suspect_until = len(self.journal.tokens) + (_PROBATION if self._retry.lost_after else 1)

    def _prepare_retry(self, loss: WeftError, placement: Placement, broke_at: int | None) -> None:
        """Begins the next attempt, or raises the loss. `broke_at`: tokens before the attempt if the connection to its
        worker broke, else None."""
        journal = self.journal
        self._backend.metrics.attempt_lost(loss)
        log.info("attempt lost", attempt=journal.attempt, reason=loss.reason, tokens=len(journal.tokens))
        retry = self._retries.next(self._retry, loss, placement)
        if retry is None:
            raise loss
        on, after = ("", 0) if broke_at is None else (placement.worker_id, len(journal.tokens) - broke_at)
        self._retry = replace(retry, lost_on=on, lost_after=after)
        if len(journal.tokens) >= self._messages.max_tokens:
            self._answer.end(Ending(api.FINISH_REASON_LENGTH))
        else:
            journal.begin_attempt()

    def _begin_span(self) -> telemetry.Span:
        """The span of the next attempt; the worker's span of the job is its child."""
        attributes = {"weft.attempt": self.journal.attempt, "weft.sample_index": self._messages.sample_index}
        return telemetry.start("attempt", self._admitted.traceparent, kind="client", attributes=attributes)

    def _on_tokens(self) -> None:
        attempt = self._attempt
        if attempt is not None and self._suspect_until is not None:
            attempt.advance()
            if len(self.journal.tokens) >= self._suspect_until:
                self._suspect_until = None
                self._backend.scheduler.report_survived(self._messages.job_id)
        if attempt is not None and len(attempt.stream.tokens) >= UNREAD_TOKENS:
            attempt.advance()  # No client reads: stop strings must be found nevertheless.
        self._answer.notify()
