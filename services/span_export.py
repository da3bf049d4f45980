"""Export of spans to a collector that may be slow or absent: a bound on waiting spans, and pauses after failures.

Knows batches and counts, never the contents of a span.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

log = structlog.get_logger("telemetry")

LONGEST_PAUSE_S = 30.0
"""After failures the exporter pauses for 1 s, 2 s, 4 s, ... up to this."""
REPORT_S = 60.0
"""Failures of the collector are logged at most this often."""


class SpanBudget:
    """Bounds the number of waiting spans and counts outcomes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting = self._exported = self._dropped = 0

    def admit(self) -> bool:
        """Whether one more span may wait; if not, the span counts as dropped."""
        with self._lock:
            admitted = self._waiting < self._limit
            self._waiting += admitted
            self._dropped += not admitted
            return admitted

    def release(self, count: int, exported: bool) -> None:
        """Counts `count` waiting spans as exported or dropped."""
        with self._lock:
            self._waiting -= count
            self._exported += count if exported else 0
            self._dropped += 0 if exported else count

    def outcomes(self) -> dict[str, int]:
        """The number of spans by outcome."""
        with self._lock:
            return {"exported": self._exported, "dropped": self._dropped}


class SpanExporter:
    """Exports batches of spans, in the thread of OpenTelemetry's batch processor.

    After a failure it pauses; spans that it cannot export are dropped and counted.
    """

    def __init__(self, send: Callable[[Any], bool], budget: SpanBudget) -> None:
        """`send` sends a batch to the collector and returns whether the collector accepted it."""
        self._send = send
        self._budget = budget
        self._pause_s = 0.0
        self._logged_at = float("-inf")
        self._ending = threading.Event()
        self._stopped = False

    def export(self, batch: Any) -> bool:
        """Exports a batch and returns whether that succeeded. After a failure it returns when the pause is over."""
        try:
            exported = not self._stopped and self._send(batch)
        except Exception:  # A broken connection may raise any exception.
            exported = False
        self._budget.release(len(batch), exported)
        if exported:
            self._pause_s = 0.0
        else:
            self._log_failure()
            self._pause_s = min(max(1.0, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._ending.wait(self._pause_s)
        return exported

    def end_pauses(self) -> None:
        """Ends the current pause and makes no more of them: the process ends."""
        self._ending.set()

    def stop(self) -> None:
        """Drops all further batches."""
        self._stopped = True

    def _log_failure(self) -> None:
        now = time.monotonic()
        if now - self._logged_at >= REPORT_S and not self._ending.is_set():
            self._logged_at = now
            log.warning("the trace collector does not accept spans", dropped=self._budget.outcomes()["dropped"])
