"""Spans of jobs that wait: one from each submission to its assignment, refusal or withdrawal. Decides nothing."""

from services import telemetry


class Waits:
    """The open queue spans, by gateway and job. Requests that nobody records cost nothing."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], telemetry.Span] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, gateway_id: str, job_id: str, traceparent: str, attempt: int) -> None:
        """A job asks for a worker; an earlier question of its is void."""
        span = telemetry.start("queue", traceparent, attributes={"weft.attempt": attempt})
        self.cancel(gateway_id, job_id)
        if span.recorded:
            self._open[gateway_id, job_id] = span

    def answered(self, gateway_id: str, job_id: str, attributes: telemetry.Attributes, failure: str = "") -> None:
        """It has its answer."""
        span = self._open.pop((gateway_id, job_id), None)
        if span is not None:
            span.set(attributes)
            if failure:
                span.fail(failure)
            span.end()

    def cancel(self, gateway_id: str, job_id: str) -> None:
        """Nobody wants the answer any more."""
        self.answered(gateway_id, job_id, {"weft.cancelled": True})

    def leave(self, gateway_id: str) -> None:
        """A gateway is gone with all its questions."""
        for gateway, job_id in list(self._open):
            if gateway == gateway_id:
                self.cancel(gateway, job_id)
