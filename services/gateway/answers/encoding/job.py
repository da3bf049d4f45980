"""One job for an encoder: some texts of a request. The author of its recovery, which is the next attempt, elsewhere.

Knows scheduler and workers, no caches and no clients.
"""

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import structlog

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import hashing, telemetry
from services.errors import WeftError
from services.gateway.access.tenants import Tenant
from services.gateway.answers.early_attempt import EarlyAttempt, early_link
from services.gateway.answers.job_messages import remaining_s
from services.gateway.answers.receipt import AttemptCosts
from services.gateway.answers.retry_policy import RetryPolicy, RetryState
from services.gateway.backend import Backend
from services.gateway.links.adapters import Served
from services.gateway.links.worker_link import JobStream, WorkerLink, worker_lost
from services.gateway.text.inputs import InputTokens
from services.gateway.text.journal import packed

log = structlog.get_logger("encode")


@dataclass(frozen=True, slots=True)
class EncodeRequestParts:
    """What the jobs of a request have in common."""

    tenant: Tenant
    served: Served
    name: str
    """Unique in the mesh: the beginning of the ids of its jobs."""
    traceparent: str
    deadline: float
    """On `time.monotonic`; infinite for none."""
    priority: int = 0
    dimensions: int = 0
    """Leading numbers of each vector; 0: all."""
    normalize: bool = False

    @property
    def vector_bytes(self) -> int:
        """Bytes of each vector."""
        return 4 * (self.dimensions or self.served.card.encoder.width)


class _Attempt(NamedTuple):
    """An attempt whose job was sent."""

    stream: JobStream
    span: telemetry.Span


@dataclass(eq=False)
class EncodeJob:
    """Texts that a worker encodes together."""

    backend: Backend
    request: EncodeRequestParts
    number: int
    """Among the jobs of the request."""
    texts: Sequence[InputTokens]
    fields: Sequence[str]
    """What the texts are called in messages to the client."""
    costs: AttemptCosts = field(default_factory=AttemptCosts)

    @property
    def job_id(self) -> str:
        """The id of the job, the same for all attempts."""
        return f"{self.request.name}/{self.number}"

    async def run(self) -> list[bytes]:
        """A vector for each text. Raises WeftError."""
        with self._early_attempt() or nullcontext() as early:
            if early is not None:
                await asyncio.sleep(0)  # Its job is written before the scheduler's message is made.
            return await self._run(early)

    async def _run(self, early: EarlyAttempt[_Attempt] | None) -> list[bytes]:
        policy, state = RetryPolicy(self.backend.settings.gateway_max_attempts), RetryState()
        scheduler, number = self.backend.scheduler, 1
        while True:
            placement = await scheduler.submit(self._submit(number, state))
            assert isinstance(placement, mesh.Assigned), "no job joins another one without an identity"
            self.costs.assigned(placement.worker_id, placement.queue_s)
            confirmed = early is not None and early.confirm(placement)
            attempt = early.attempt if early is not None and confirmed else self._open(placement, number)
            attempt.span.set({"weft.worker": placement.worker_id})
            stream = await self._finish(attempt)
            loss = self._loss(stream)
            if loss is None and stream.end is not None:
                if placement.probation:
                    scheduler.report_survived(self.job_id)
                return self._vectors(stream.end.vectors)
            loss = loss or worker_lost()
            self.backend.metrics.attempt_lost(loss)
            log.info("attempt lost", attempt=number, reason=loss.reason)
            retry = policy.next(state, loss, placement)
            if retry is None:
                raise loss
            broken = stream.broken or (early is not None and early.attempt.stream.broken)
            state = replace(retry, lost_on=placement.worker_id if broken else "", lost_after=0)
            early, number = None, number + 1

    def _early_attempt(self) -> EarlyAttempt[_Attempt] | None:
        """Sends the first attempt before the scheduler's answer, where that is likely to be this worker."""
        link = early_link(self.backend, self.request.served, lambda: self._fingerprint)
        return EarlyAttempt(self._open_at(link, None, 1)) if link is not None else None

    def _open(self, placement: mesh.Assigned, number: int) -> _Attempt:
        return self._open_at(self.backend.workers.to(placement.address), placement, number)

    def _open_at(self, link: WorkerLink, placement: mesh.Assigned | None, number: int) -> _Attempt:
        """Sends the job to a worker; without a placement as a tentative one."""
        span = telemetry.start("attempt", self.request.traceparent, kind="client")
        span.set({"weft.attempt": number, "weft.texts": len(self.texts)})
        worker_id = placement.worker_id if placement is not None else ""
        return _Attempt(link.run(self._job(placement, number, span.traceparent), worker_id, lambda: None), span)

    async def _finish(self, attempt: _Attempt) -> JobStream:
        """The stream of an attempt, once it is closed."""
        stream = attempt.stream
        with attempt.span:
            try:
                await stream.closed
            finally:
                stream.link.cancel(stream, 0)
            has_cost = stream.end is not None and stream.end.HasField("cost")
            self.costs.add(stream.end.cost if stream.end is not None and has_cost else stream.observed_cost())
        return stream

    def _loss(self, stream: JobStream) -> WeftError | None:
        """Why a stream has returned no vectors; None: it has."""
        end = stream.end
        if end is None:
            return stream.loss or worker_lost()
        if end.reason == api.FINISH_REASON_STOP:
            whole = len(end.vectors.data) == len(self.texts) * self.request.vector_bytes
            return None if whole else worker_lost()
        if not end.HasField("failure"):
            return worker_lost()
        failure = WeftError.from_failure(end.failure)
        if end.HasField("failed_text") and end.failed_text < len(self.fields):
            failure.field = self.fields[end.failed_text]
            failure.message = f"{failure.field}: {failure.message}"
        return failure

    def _vectors(self, vectors: mesh.Vectors) -> list[bytes]:
        size, data = self.request.vector_bytes, vectors.data
        return [data[start : start + size] for start in range(0, len(data), size)]

    def _submit(self, attempt: int, state: RetryState) -> mesh.Submit:
        request = self.request
        return mesh.Submit(
            job_id=self.job_id,
            attempt=attempt,
            model=request.served.card.name,
            prompt_tokens=len(self._token_ids),
            max_tokens=1,
            deadline_s=remaining_s(request.deadline),
            tenant=request.tenant.hash,
            priority=request.priority,
            body=hashing.digest(b"weft/body/1", self.job_id.encode()),
            avoid=state.avoid,
            traceparent=request.traceparent,
            fingerprint=self._fingerprint,
            lost_on=state.lost_on,
            lost_after=state.lost_after,
        )

    def _job(self, placement: mesh.Assigned | None, attempt: int, traceparent: str) -> mesh.Job:
        request, token_ids = self.request, self._token_ids
        pairs = any(text.second for text in self.texts)
        return mesh.Job(
            job_id=self.job_id,
            attempt=attempt,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            deadline_s=remaining_s(request.deadline),
            priority=request.priority,
            traceparent=traceparent,
            placement=placement.placement if placement is not None else 0,
            tentative=placement is None,
            encode=mesh.EncodeTask(
                lengths=[len(text.token_ids) for text in self.texts],
                seconds=[text.second for text in self.texts] if pairs else (),
                dimensions=request.dimensions,
                normalize=request.normalize,
            ),
        )

    @cached_property
    def _token_ids(self) -> "array[int]":
        """The tokens of all texts."""
        return array("I", chain.from_iterable(text.token_ids for text in self.texts))

    @cached_property
    def _fingerprint(self) -> bytes:
        """What all attempts have in common: tenant, model and tokens."""
        request = self.request
        tokens = packed(self._token_ids)
        return hashing.digest(b"weft/request/1", request.tenant.salt, request.served.card.fingerprint, tokens)
