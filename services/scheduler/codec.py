"""Converts the core's messages to protobuf and back. Rejects malformed messages by field, and decides nothing."""

import math
from collections.abc import Iterable
from typing import Any

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import invalid
from services.hashing import KEY_BYTES
from services.scheduler.core.messages import (
    Adapter,
    Assigned,
    Card,
    EndedJob,
    Failure,
    GatewayMessage,
    Handoff,
    Joined,
    ModelList,
    Rejected,
    Role,
    RunningJob,
    SchedulerHello,
    ServedWorker,
    Submit,
    Suspects,
    WorkerHello,
    WorkerLoading,
    WorkerLost,
    WorkerMessage,
    WorkerReport,
)

_COUNTERS = (
    "steps", "step_s", "running", "waiting", "prefill_backlog", "prefill_rate", "decode_s", "free_blocks",
    "cached_blocks", "active_blocks", "preemptions",
)  # fmt: skip
"""Fields of a worker's report that are the same in both forms."""
ROLES = {
    Role.BOTH: api.WORKER_ROLE_UNSPECIFIED,
    Role.PREFILL: api.WORKER_ROLE_PREFILL,
    Role.DECODE: api.WORKER_ROLE_DECODE,
}

# ---- received ----


def submit_from(submit: mesh.Submit) -> Submit:
    """A gateway's submission. Raises WeftError, which names the field."""
    if not submit.job_id:
        raise invalid("job_id", "is empty")
    if submit.attempt < 1:
        raise invalid("attempt", "must be at least 1")
    if not math.isfinite(submit.deadline_s):
        raise invalid("deadline_s", "must be a finite number of seconds")
    _check_keys("block_keys", submit.block_keys)
    return Submit(
        job_id=submit.job_id,
        attempt=submit.attempt,
        model=submit.model,
        prompt_tokens=submit.prompt_tokens,
        max_tokens=submit.max_tokens,
        block_keys=submit.block_keys,
        deadline_s=submit.deadline_s or None,
        tenant=submit.tenant,
        priority=submit.priority,
        identity=submit.identity,
        body=submit.body,
        avoid=frozenset(submit.avoid),
        unjoinable=submit.unjoinable,
        fingerprint=submit.fingerprint,
        lost_on=submit.lost_on,
        lost_after=submit.lost_after,
        sheddable=submit.sheddable,
        adapter=submit.adapter,
    )


def hello_from(hello: mesh.WorkerHello) -> WorkerHello:
    """A worker's hello, unchecked: the core checks it."""
    return WorkerHello(
        worker_id=hello.worker_id,
        address=hello.address,
        card=card_from(hello.card),
        credits=hello.credits,
        running=tuple(RunningJob(job.job_id, job.attempt) for job in hello.running),
        stored_keys=hello.stored_keys,
        adapters=adapters_from(hello.adapters),
        role=next((role for role, value in ROLES.items() if value == hello.role), Role.BOTH),
    )


def adapters_from(found: mesh.AdapterList) -> tuple[Adapter, ...]:
    """The adapters that a worker serves."""
    return tuple(Adapter(each.name, each.fingerprint, each.rank, each.bytes, each.resident) for each in found.adapters)


def loading_from(loading: mesh.WorkerLoading) -> WorkerLoading:
    """The progress of a starting worker. Raises WeftError, which names the field."""
    for name in ("worker_id", "model"):
        if not getattr(loading, name):
            raise invalid(name, "is empty")
    aliases = tuple(loading.aliases)
    return WorkerLoading(loading.worker_id, loading.model, aliases, loading.phase, loading.done, loading.total)


def card_from(card: mesh.ModelCard) -> Card:
    """The fields of a model card that the core reads, and the whole card to forward."""
    return Card(
        name=card.name,
        aliases=tuple(card.aliases),
        fingerprint=card.fingerprint,
        block_size=card.block_size,
        bundle_digest=card.bundle_digest,
        detail=card,
    )


def report_from(report: mesh.WorkerReport) -> WorkerReport:
    """A worker's report. Raises WeftError, which names the field."""
    _check_keys("stored_keys", report.stored_keys)
    _check_keys("evicted_keys", report.evicted_keys)
    for name in ("step_s", "prefill_rate", "decode_s", "engine_cpu_s"):
        if not 0 <= getattr(report, name) < math.inf:
            raise invalid(name, "must be a finite number from 0")
    return WorkerReport(
        **_counters(report),
        ended=tuple(
            EndedJob(job.job_id, job.attempt, job.tokens, job.placement, job.handed_off) for job in report.ended
        ),
        stored_keys=report.stored_keys,
        evicted_keys=report.evicted_keys,
        draining=report.draining,
        engine_cpu_s=report.engine_cpu_s,
        busy=report.busy,
        adapters=adapters_from(report.adapters) if report.HasField("adapters") else None,
    )


def _counters(report: mesh.WorkerReport | WorkerReport) -> dict[str, Any]:
    """What a report counts and measures, in either form."""
    return {name: getattr(report, name) for name in _COUNTERS}


def _check_keys(field: str, joined: bytes) -> None:
    if len(joined) % KEY_BYTES:
        raise invalid(field, f"must be a list of {KEY_BYTES}-byte keys")


# ---- sent ----


def to_gateway(message: GatewayMessage, mesh_id: str = "") -> mesh.DispatchResponse:
    """A message to a gateway."""
    match message:
        case Assigned():
            return mesh.DispatchResponse(
                assigned=mesh.Assigned(
                    job_id=message.job_id,
                    attempt=message.attempt,
                    worker_id=message.worker_id,
                    address=message.address,
                    queue_s=message.queue_s,
                    matched_blocks=message.matched_blocks,
                    placement=message.placement,
                    probation=message.probation,
                    handoff=_handoff(message.handoff),
                    source=message.source,
                    retry_after_s=message.retry_after_s,
                )
            )
        case Joined():
            return mesh.DispatchResponse(
                joined=mesh.Joined(
                    job_id=message.job_id,
                    attempt=message.attempt,
                    worker_id=message.worker_id,
                    address=message.address,
                    leader_job_id=message.leader_job_id,
                    handoff=_handoff(message.handoff),
                )
            )
        case Rejected(job_id, attempt, failure):
            rejected = mesh.Rejected(job_id=job_id, attempt=attempt, failure=failure_of(failure))
            return mesh.DispatchResponse(rejected=rejected)
        case Suspects(fingerprints):
            return mesh.DispatchResponse(suspects=mesh.Suspects(fingerprints=fingerprints))
        case WorkerLost(worker_id):
            return mesh.DispatchResponse(worker_lost=mesh.WorkerLost(worker_id=worker_id))
        case ModelList(models, loading):
            served = []
            for model in models:
                assert isinstance(model.card.detail, mesh.ModelCard), model
                workers = [_served_worker(worker) for worker in model.workers]
                served.append(mesh.ServedModel(card=model.card.detail, addresses=model.addresses, workers=workers))
            return mesh.DispatchResponse(models=mesh.ModelList(models=served, loading=loading_messages(loading)))
        case SchedulerHello(epoch):
            hello = mesh.SchedulerHello(
                epoch=epoch, mesh_id=mesh_id, accepts_reports=True, counts_submissions=True, reads_more=True
            )
            return mesh.DispatchResponse(hello=hello)


def _handoff(handoff: Handoff | None) -> mesh.Handoff | None:
    return mesh.Handoff(**handoff._asdict()) if handoff is not None else None


def _served_worker(worker: ServedWorker) -> mesh.ServedWorker:
    adapters = [mesh.AdapterState(**each._asdict()) for each in worker.adapters]
    return mesh.ServedWorker(
        worker_id=worker.worker_id,
        address=worker.address,
        credits=worker.credits,
        adapters=adapters,
        role=ROLES[worker.role],
    )


def loading_messages(loading: Iterable[WorkerLoading]) -> list[mesh.WorkerLoading]:
    """The starting workers as protobuf messages."""
    return [mesh.WorkerLoading(**each._asdict()) for each in loading]


def report_message(report: WorkerReport) -> mesh.WorkerReport:
    """The counters of a worker's report."""
    return mesh.WorkerReport(
        **_counters(report),
        draining=report.draining,
    )


def to_worker(message: WorkerMessage, mesh_id: str = "") -> mesh.AttachResponse:
    """A message to a worker."""
    if isinstance(message, SchedulerHello):
        return mesh.AttachResponse(hello=mesh.SchedulerHello(epoch=message.epoch, mesh_id=mesh_id))
    return mesh.AttachResponse(refused=failure_of(message.failure))


def failure_of(failure: Failure) -> mesh.Failure:
    """A refusal. It is not marked retryable: there is one scheduler, so another attempt gets the same answer."""
    return mesh.Failure(
        code=failure.code,
        reason=failure.reason,
        message=failure.message,
        retry_after_s=failure.retry_after_s,
        field=failure.field,
    )
