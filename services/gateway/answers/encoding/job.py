"""One job for an encoder: some texts of a request. The author of its recovery, which is the next attempt, elsewhere.

Knows scheduler and workers, no caches and no clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import hashing, telemetry
from services.errors import WeftError
from services.gateway.access.tenants import Tenant
from services.gateway.answers.job_messages import remaining_s
from services.gateway.answers.receipt import AttemptCosts
from services.gateway.answers.retry_policy import RetryPolicy, RetryState
from services.gateway.backend import Backend
from services.gateway.links.adapters import Served
from services.gateway.links.worker_link import JobStream, worker_lost
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


@dataclass(eq=False, slots=True)
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
        policy, state = RetryPolicy(self.backend.settings.gateway_max_attempts), RetryState()
        scheduler, attempt = self.backend.scheduler, 1
        while True:
            placement = await scheduler.submit(self._submit(attempt, state))
            assert isinstance(placement, mesh.Assigned), "no job joins another one without an identity"
            self.costs.assigned(placement.worker_id, placement.queue_s)
            stream = await self._attempt(placement, attempt)
            loss = self._loss(stream)
            if loss is None and stream.end is not None:
                if placement.probation:
                    scheduler.report_survived(self.job_id)
                return self._vectors(stream.end.vectors)
            loss = loss or worker_lost()
            self.backend.metrics.attempt_lost(loss)
            log.info("attempt lost", attempt=attempt, reason=loss.reason)
            retry = policy.next(state, loss, placement)
            if retry is None:
                raise loss
            state = replace(retry, lost_on=placement.worker_id if stream.broken else "", lost_after=0)
            attempt += 1

    async def _attempt(self, placement: mesh.Assigned, attempt: int) -> JobStream:
        """Runs the job at a worker until its stream is closed."""
        link = self.backend.workers.to(placement.address)
        with telemetry.start("attempt", self.request.traceparent, kind="client") as span:
            span.set({"weft.attempt": attempt, "weft.worker": placement.worker_id, "weft.texts": len(self.texts)})
            job = self._job(placement, attempt, span.traceparent)
            stream = link.run(job, placement.worker_id, lambda: None)
            try:
                await stream.closed
            finally:
                link.cancel(stream, 0)
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
        request, token_ids = self.request, self._token_ids()
        fingerprint = (b"weft/request/1", request.tenant.salt, request.served.card.fingerprint, packed(token_ids))
        return mesh.Submit(
            job_id=self.job_id,
            attempt=attempt,
            model=request.served.card.name,
            prompt_tokens=len(token_ids),
            max_tokens=1,
            deadline_s=remaining_s(request.deadline),
            tenant=request.tenant.hash,
            priority=request.priority,
            body=hashing.digest(b"weft/body/1", self.job_id.encode()),
            avoid=state.avoid,
            traceparent=request.traceparent,
            fingerprint=hashing.digest(*fingerprint),
            lost_on=state.lost_on,
            lost_after=state.lost_after,
        )

    def _job(self, placement: mesh.Assigned, attempt: int, traceparent: str) -> mesh.Job:
        request, token_ids = self.request, self._token_ids()
        pairs = any(text.second for text in self.texts)
        return mesh.Job(
            job_id=self.job_id,
            attempt=attempt,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            deadline_s=remaining_s(request.deadline),
            priority=request.priority,
            traceparent=traceparent,
            placement=placement.placement,
            encode=mesh.EncodeTask(
                lengths=[len(text.token_ids) for text in self.texts],
                seconds=[text.second for text in self.texts] if pairs else (),
                dimensions=request.dimensions,
                normalize=request.normalize,
            ),
        )

    def _token_ids(self) -> list[int]:
        return [token for text in self.texts for token in text.token_ids]
