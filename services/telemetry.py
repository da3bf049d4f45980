"""Logs and traces of a service. They contain no prompt text, no keys and no addresses of clients.

A span that is not recorded costs microseconds and still passes the trace context on. OpenTelemetry is imported, only
here, if the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_BSP_..., ...) turn tracing on.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import structlog

from services import span_export
from services.settings import CommonSettings
from services.span_export import SpanBudget

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as Recorded
    from opentelemetry.trace import SpanContext

log = structlog.get_logger("telemetry")

Kind = Literal["internal", "server", "client"]
Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]

EXPORT_S = 2.0
"""Time limit of one export unless OTEL_EXPORTER_OTLP_TIMEOUT is set."""
FLUSH_S = 0.8
"""How long the end of the process may wait for the export of the last spans."""

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def setup(service: str, settings: CommonSettings) -> None:
    """Configures logging, and tracing if the environment names a collector."""
    global _tracing
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=lambda *_: _LogWriter(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
    if _tracing_requested():
        try:
            _tracing = _Tracing(service)
        except ValueError as error:
            log.warning("tracing is off: an OTEL_ variable has an invalid value", reason=str(error))


def log_exception(event: str, error: BaseException) -> None:
    """Logs the type of an exception and its last six lines of code; its text may contain a client's data."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    log.error(event, type=type(error).__name__, frames=frames[-6:])


class _LogWriter(structlog.PrintLogger):
    """Writes log lines to a stream. A stream whose reader is gone must not fail the code that logs."""

    def msg(self, message: str) -> None:
        """Writes a line; ignores a broken stream."""
        with contextlib.suppress(OSError):
            super().msg(message)

    debug = info = warning = error = critical = exception = msg


def close() -> None:
    """Exports the last spans, for at most FLUSH_S seconds. Spans that end later are lost."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()


def spans() -> dict[str, int]:
    """The number of recorded spans of this process by outcome: exported or dropped."""
    return _tracing.budget.outcomes() if _tracing is not None else {"exported": 0, "dropped": 0}


class Span:
    """A span of a request's trace, recorded or not. As a context manager it ends with its block."""

    __slots__ = ("_recorded", "traceparent")

    def __init__(self, traceparent: str, recorded: "Recorded | None" = None) -> None:
        self.traceparent = traceparent
        """The W3C header by which other spans name this one as their parent."""
        self._recorded = recorded

    @property
    def recorded(self) -> bool:
        """Whether the span is exported."""
        return self._recorded is not None

    @property
    def trace_id(self) -> str:
        """The trace's id: 32 hexadecimal digits."""
        return self.traceparent.split("-")[1]

    def rename(self, name: str) -> None:
        """Sets the name, if it was not known at the start."""
        if self._recorded is not None:
            self._recorded.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        if self._recorded is not None:
            self._recorded.set_attributes(attributes)

    def event(self, name: str, at: float) -> None:
        """Adds an event at `at` of `time.monotonic`."""
        if self._recorded is not None:
            self._recorded.add_event(name, timestamp=_epoch_ns(at))

    def fail(self, reason: str) -> None:
        """Marks the span as failed; `reason` is one of a few names in UPPER_SNAKE_CASE."""
        if self._recorded is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, reason))
            self._recorded.set_attribute("error.type", reason)

    def end(self, at: float | None = None) -> None:
        """Ends the span at `at` (of `time.monotonic`), or now."""
        if self._recorded is not None:
            self._recorded.end(None if at is None else _epoch_ns(at))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):  # A cancelled span has not failed.
            self.set({"weft.cancelled": True})
        elif error is not None:
            self.fail(str(getattr(error, "reason", "INTERNAL")))
        self.end()


def start(
    name: str,
    parent: str,
    *,
    kind: Kind = "internal",
    began: float | None = None,
    attributes: Attributes | None = None,
    link: str = "",
) -> Span:
    """Starts a span, now or at `began` of `time.monotonic`.

    `parent` is a W3C traceparent; any other text starts a new trace. `link` is the traceparent of a related span in
    another trace.
    """
    if _tracing is None:
        return Span(parent if _match(parent) else _unsampled())
    return _tracing.start(name, parent, kind, began, attributes, link)


def record(name: str, parent: Span, began: float, seconds: float, attributes: Attributes | None = None) -> None:
    """Records a span that began at `began` of `time.monotonic` and took `seconds`."""
    if parent.recorded:
        start(name, parent.traceparent, began=began, attributes=attributes).end(began + seconds)


def _unsampled() -> str:
    """The traceparent of a new trace that is not sampled."""
    digits = os.urandom(24).hex()
    return f"00-{digits[:32]}-{digits[32:]}-00"


def _match(traceparent: str) -> re.Match[str] | None:
    """The match of a valid traceparent; None for any other text."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match if match is not None and int(match[1], 16) and int(match[2], 16) else None


def _epoch_ns(at: float) -> int:
    return time.time_ns() - int((time.monotonic() - at) * 1e9)


def _tracing_requested() -> bool:
    """Whether the environment turns on tracing with a supported exporter."""
    environ = os.environ
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    named = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (named or exporter) or exporter == "none":
        return False
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if exporter not in ("", "otlp") or protocol != "grpc":
        log.warning(
            "tracing is off: the only supported exporter is otlp over grpc", exporter=exporter, protocol=protocol
        )
        return False
    if importlib.util.find_spec("opentelemetry") is None:
        log.warning("tracing is off: OpenTelemetry is not installed (pip install 'weft[telemetry]')")
        return False
    return True


class _Tracing:
    """OpenTelemetry, configured by the environment."""

    def __init__(self, service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        # Failures of the collector are logged by span_export.SpanExporter, at a bounded rate.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        limit = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "2048"))
        budget = self.budget = SpanBudget(limit)
        timed = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}TIMEOUT") for name in ("", "TRACES_"))
        otlp = self._otlp = OTLPSpanExporter(timeout=None if timed else EXPORT_S)
        exporter = self._exporter = span_export.SpanExporter(
            lambda batch: otlp.export(batch) is SpanExportResult.SUCCESS, budget
        )

        class Exporter(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                return SpanExportResult.SUCCESS if exporter.export(spans) else SpanExportResult.FAILURE

        class Processor(BatchSpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                if budget.admit():
                    super().on_end(span)

        names = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"weft-{service}"}
        resource = Resource.create({**names, "service.instance.id": secrets.token_hex(8)})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(Processor(Exporter(), max_queue_size=limit))
        self._follows_parents = os.environ.get("OTEL_TRACES_SAMPLER", "parentbased").startswith("parentbased")
        self._tracer = self._provider.get_tracer("weft")
        self._trace = trace
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}

    def start(
        self, name: str, parent: str, kind: Kind, began: float | None, attributes: Attributes | None, link: str
    ) -> Span:
        """See the function `start`."""
        # OpenTelemetry would return the same seven times as slowly, and most requests are not sampled.
        if self._follows_parents and parent.endswith("-00") and _match(parent):
            return Span(parent)
        linked = self._remote(link)
        span = self._tracer.start_span(
            name,
            context=self._context(parent),
            kind=self._kinds[kind],
            attributes=attributes,
            links=[self._trace.Link(linked)] if linked is not None else None,
            start_time=None if began is None else _epoch_ns(began),
        )
        own = span.get_span_context()
        traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}"
        return Span(traceparent, span if span.is_recording() else None)

    def close(self) -> None:
        """Exports the last spans, for at most FLUSH_S seconds."""
        self._exporter.end_pauses()
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        self._exporter.stop()
        self._otlp.shutdown()

    def _context(self, parent: str) -> "Context":
        from opentelemetry.context import Context

        remote = self._remote(parent)
        if remote is None:
            return Context()
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(remote), Context())

    def _remote(self, traceparent: str) -> "SpanContext | None":
        match = _match(traceparent)
        if match is None:
            return None
        flags = self._trace.TraceFlags(int(match[3], 16))
        return self._trace.SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=flags)


_tracing: _Tracing | None = None
