"""Logs and traces of a service: the door to OpenTelemetry. No prompt text, no keys, no addresses of clients reach them.

A span that is not recorded costs microseconds and still has a place in a trace. OpenTelemetry is imported only when
the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_BSP_..., ...) turn tracing on.
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
"""How long one export may take, unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise."""
FLUSH_S = 0.8
"""How long the end of the process may wait for the collector to take what is left."""

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
        logger_factory=lambda *_: _Lines(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
    if _wanted():
        try:
            _tracing = _Tracing(service)
        except ValueError as error:
            log.warning("no traces: an OTEL_ variable cannot be used", reason=str(error))


def log_exception(event: str, error: BaseException) -> None:
    """Logs where an exception came from, by type and line: its text may hold what a client sent."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    log.error(event, type=type(error).__name__, frames=frames[-6:])


class _Lines(structlog.PrintLogger):
    """Where lines of a log go. That nobody reads them any more must not fail what they tell of."""

    def msg(self, message: str) -> None:
        """Writes a line, if it can be written."""
        with contextlib.suppress(OSError):
            super().msg(message)

    debug = info = warning = error = critical = exception = msg


def close() -> None:
    """Sends what is left, for a moment. Spans that end later are lost."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()


def spans() -> dict[str, int]:
    """What became of the recorded spans of this process so far, by outcome: exported or dropped."""
    return _tracing.tally.outcomes() if _tracing is not None else {"exported": 0, "dropped": 0}


class Span:
    """A part of a request's trace, recorded or not. As a context manager it ends with its block."""

    __slots__ = ("_recorded", "traceparent")

    def __init__(self, traceparent: str, recorded: "Recorded | None" = None) -> None:
        self.traceparent = traceparent
        """The W3C header that makes this span the parent of what follows."""
        self._recorded = recorded

    @property
    def recorded(self) -> bool:
        """Whether anybody will see it."""
        return self._recorded is not None

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent.split("-")[1]

    def rename(self, name: str) -> None:
        """Gives it the name that was not known at its start."""
        if self._recorded is not None:
            self._recorded.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        if self._recorded is not None:
            self._recorded.set_attributes(attributes)

    def event(self, name: str, at: float) -> None:
        """Something happened in it at an instant of `time.monotonic`."""
        if self._recorded is not None:
            self._recorded.add_event(name, timestamp=_epoch_ns(at))

    def fail(self, reason: str) -> None:
        """It did not bring what it should; `reason` is one of few words in capitals."""
        if self._recorded is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, reason))
            self._recorded.set_attribute("error.type", reason)

    def end(self, at: float | None = None) -> None:
        """It is over, since `at` (of `time.monotonic`) or now."""
        if self._recorded is not None:
            self._recorded.end(None if at is None else _epoch_ns(at))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):  # Needed no more, which is no failure of its own.
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
    """A new span below `parent`, a W3C traceparent (anything else: a new trace), begun now or at `began` of
    `time.monotonic`. `link` is the traceparent of a span in another trace that this one has to do with."""
    if _tracing is None:
        return Span(parent if _match(parent) else _unseen())
    return _tracing.start(name, parent, kind, began, attributes, link)


def record(name: str, parent: Span, began: float, seconds: float, attributes: Attributes | None = None) -> None:
    """A span that is over: it began at `began` of `time.monotonic` and took so long."""
    if parent.recorded:
        start(name, parent.traceparent, began=began, attributes=attributes).end(began + seconds)


def _unseen() -> str:
    """The traceparent of a new trace that nobody records."""
    digits = os.urandom(24).hex()
    return f"00-{digits[:32]}-{digits[32:]}-00"


def _match(traceparent: str) -> re.Match[str] | None:
    """The parts of a traceparent; None unless it is valid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match if match is not None and int(match[1], 16) and int(match[2], 16) else None


def _epoch_ns(at: float) -> int:
    return time.time_ns() - int((time.monotonic() - at) * 1e9)


def _wanted() -> bool:
    """Whether the environment asks for tracing, and for one that we can do."""
    environ = os.environ
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    named = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (named or exporter) or exporter == "none":
        return False
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if exporter not in ("", "otlp") or protocol != "grpc":
        log.warning("no traces: they can be exported by otlp over grpc only", exporter=exporter, protocol=protocol)
        return False
    if importlib.util.find_spec("opentelemetry") is None:
        log.warning("no traces: OpenTelemetry is not installed (pip install 'weft[telemetry]')")
        return False
    return True


class _Tracing:
    """OpenTelemetry, set up as the environment says."""

    def __init__(self, service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        # Trouble is told by the courier, at its pace.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        limit = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "2048"))
        tally = self.tally = SpanBudget(limit)
        timed = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}TIMEOUT") for name in ("", "TRACES_"))
        exporter = self._exporter = OTLPSpanExporter(timeout=None if timed else EXPORT_S)
        courier = self._courier = span_export.SpanExporter(
            lambda batch: exporter.export(batch) is SpanExportResult.SUCCESS, tally
        )

        class Exporter(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                return SpanExportResult.SUCCESS if courier.bring(spans) else SpanExportResult.FAILURE

        class Processor(BatchSpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                if tally.admit():
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
        # OpenTelemetry would come to the same, seven times as slowly: most requests are not sampled.
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
        """Gives the collector a moment for what is left."""
        self._courier.leave()
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        self._courier.give_up()
        self._exporter.shutdown()

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
