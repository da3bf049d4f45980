"""Logs and traces of a service. No prompt text, no keys, no addresses of clients ever reach them."""

import logging
import os
import re
import secrets
import sys

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, Tracer

from services.settings import CommonSettings

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def setup(service: str, settings: CommonSettings) -> None:
    """Configures logging, and tracing if OTEL_EXPORTER_OTLP_ENDPOINT names a collector."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
    provider = TracerProvider(resource=Resource.create({"service.name": f"weft-{service}"}))
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def tracer() -> Tracer:
    """The tracer of this process."""
    return trace.get_tracer("weft")


def parent(traceparent: str | None) -> Context:
    """The context that a W3C traceparent header describes; a fresh root if it is absent or malformed."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or int(match[1], 16) == 0 or int(match[2], 16) == 0:
        return Context()
    remote = SpanContext(
        int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=TraceFlags(int(match[3], 16))
    )
    return trace.set_span_in_context(NonRecordingSpan(remote), Context())


def traceparent_of(span: trace.Span) -> str:
    """The W3C traceparent header that makes `span` the parent of what follows."""
    context = span.get_span_context()
    trace_id = context.trace_id or secrets.randbits(128)
    span_id = context.span_id or secrets.randbits(64)
    return f"00-{trace_id:032x}-{span_id:016x}-{int(context.trace_flags):02x}"
