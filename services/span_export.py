"""The way of spans to a collector that may be slow, or gone: how many may wait, and when it is left alone.

Knows batches and counts, never what a span tells.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

log = structlog.get_logger("telemetry")

LONGEST_PAUSE_S = 30.0
"""A collector that fails is left alone for 1 s, 2 s, 4 s, ... up to this."""
REPORT_S = 60.0
"""Trouble with the collector is logged at most this often."""


class SpanBudget:
    """What became of spans, and how many wait. The one bound of the queue; any thread may call."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting = self._exported = self._dropped = 0

    def admit(self) -> bool:
        """Whether one more span may wait; if not, it is dropped."""
        with self._lock:
            admitted = self._waiting < self._limit
            self._waiting += admitted
            self._dropped += not admitted
            return admitted

    def settle(self, count: int, exported: bool) -> None:
        """So many spans wait no more."""
        with self._lock:
            self._waiting -= count
            self._exported += count if exported else 0
            self._dropped += 0 if exported else count

    def outcomes(self) -> dict[str, int]:
        """Spans by outcome."""
        with self._lock:
            return {"exported": self._exported, "dropped": self._dropped}


class SpanExporter:
    """Brings batches of spans to the collector, in the exporter's thread. A collector that fails is left alone for a
    while; what it would have got is dropped and counted."""

    def __init__(self, export: Callable[[Any], bool], tally: SpanBudget) -> None:
        self._export = export
        self._tally = tally
        self._pause_s = 0.0
        self._reported = float("-inf")
        self._leaving = threading.Event()
        self._gone = False

    def bring(self, batch: Any) -> bool:
        """Exports a batch and says whether that worked. After a failure it returns only when the pause is over."""
        try:
            brought = not self._gone and self._export(batch)
        except Exception:  # Whatever a broken connection makes of it.
            brought = False
        self._tally.settle(len(batch), brought)
        if brought:
            self._pause_s = 0.0
        else:
            self._report()
            self._pause_s = min(max(1.0, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._leaving.wait(self._pause_s)
        return brought

    def leave(self) -> None:
        """Pauses no more."""
        self._leaving.set()

    def give_up(self) -> None:
        """Exports nothing more."""
        self._gone = True

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_S and not self._leaving.is_set():
            self._reported = now
            log.warning("the collector takes no traces", dropped=self._tally.outcomes()["dropped"])
