"""The spans of a job, recorded at its end from times that the engine measured. Knows no engine and no links."""

from services import telemetry
from services.worker.job import Ended, EndReason


def record_job(ended: Ended, *, traceparent: str, arrived: float, model: str, attempt: int, prompt_tokens: int) -> None:
    """Records a span for a job and one for each of its phases: queue, prefill, decode.

    `arrived` is a time of `time.monotonic`. A job whose request is not sampled has no span.
    """
    cost = ended.cost
    span = telemetry.start("job", traceparent, kind="server", began=arrived)
    if not span.recorded:
        return
    span.set(
        {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "weft.attempt": attempt,
            "weft.position": ended.position,
            "weft.cached_tokens": cost.cached_tokens,
            "weft.steps": cost.steps,
            "weft.preemptions": cost.preemptions,
            "weft.drafted_tokens": cost.drafted_tokens,
            "weft.accepted_tokens": cost.accepted_tokens,
            "weft.end": ended.reason.value,
        }
    )
    if ended.reason is EndReason.ERROR:
        span.fail(ended.error.reason if ended.error is not None else "INTERNAL")
    elif ended.reason is EndReason.DEADLINE:
        span.fail("DEADLINE_EXCEEDED")
    elif ended.reason is EndReason.CANCELLED:
        span.set({"weft.cancelled": True})
    for paused_s in cost.preempted_s:
        span.event("preempted", arrived + paused_s)
    _record_phases(ended, span, arrived)


def _record_phases(ended: Ended, span: telemetry.Span, arrived: float) -> None:
    cost = ended.cost
    started = arrived + cost.queue_s
    first = started + cost.prefill_s
    telemetry.record("queue", span, arrived, cost.queue_s)
    if cost.steps:
        counts = {"weft.prefill_tokens": cost.prefill_tokens, "weft.prefill_steps": cost.prefill_steps}
        telemetry.record("prefill", span, started, cost.prefill_s, counts)
    if cost.first_token:
        span.event("first token", first)
        telemetry.record("decode", span, first, cost.decode_s, {"weft.steps": cost.steps - cost.prefill_steps})
    span.end(first + cost.decode_s)


def record_attach(traceparent: str, leader: str) -> None:
    """Records that a request joined a running job, with a link to the trace of that job."""
    telemetry.start("attach", traceparent, kind="server", link=leader).end()
