"""Spans of waiting jobs: one from each submission to its answer or withdrawal. Decides nothing."""

from services import telemetry


class QueueSpans:
    """The open queue spans, by gateway and job. A request that is not sampled costs nothing."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], telemetry.Span] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, gateway_id: str, job_id: str, traceparent: str, attempt: int) -> None:
        """Opens the span of a submission; an open span of an earlier submission of the job is cancelled."""
        span = telemetry.start("queue", traceparent, attributes={"weft.attempt": attempt})
        self.cancel(gateway_id, job_id)
        if span.recorded:
            self._open[gateway_id, job_id] = span

    def end(self, gateway_id: str, job_id: str, attributes: telemetry.Attributes, failure: str = "") -> None:
        """Ends the span of a job that is answered; `failure` is the reason if the job is rejected."""
        span = self._open.pop((gateway_id, job_id), None)
        if span is not None:
            span.set(attributes)
            if failure:
                span.fail(failure)
            span.end()

    def cancel(self, gateway_id: str, job_id: str) -> None:
        """Ends the span of a job that needs no answer any more."""
        self.end(gateway_id, job_id, {"weft.cancelled": True})

    def cancel_all(self, gateway_id: str) -> None:
        """Ends the spans of all jobs of a gateway that detached."""
        for gateway, job_id in list(self._open):
            if gateway == gateway_id:
                self.cancel(gateway, job_id)
