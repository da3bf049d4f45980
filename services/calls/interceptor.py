"""The interceptor around every handler: converts exceptions to statuses, counts calls, and traces them.

Knows gRPC's handlers, nothing of the services. The text of an unexpected exception never leaves the process.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from services import errors, metrics, telemetry
from services.errors import WeftError

_GRPC: telemetry.Attributes = {"rpc.system.name": "grpc"}
Check = Callable[[grpc.HandlerCallDetails], None]
"""Looks at a call before its message is read. Raises WeftError to refuse it."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Answers malformed requests with INVALID_ARGUMENT, WeftErrors with their status, other exceptions with INTERNAL.

    The first of `checks` that raises an error refuses a call. An interceptor for each would cost each call a coroutine.
    Unary calls are counted in `counts`; those of the services in `traced` are traced if the caller sends a context.
    """

    def __init__(
        self, counts: metrics.Metrics, traced: frozenset[str] = frozenset(), checks: Sequence[Check] = ()
    ) -> None:
        self._checks = checks
        self._traced = traced
        self._guarded: dict[str, tuple[Any, Any]] = {}
        self._seconds = counts.histogram(
            "weft_rpc_seconds", "Duration of unary calls, by method and status code.", metrics.SHORT_S, "method", "code"
        )
        counts.total("weft_trace_spans", "Spans by outcome.", _spans, "outcome")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            for check in self._checks:
                check(handler_call_details)
        except WeftError as error:
            handler = refusing(handler, error)
        method = str(handler_call_details.method)
        known, guarded = self._guarded.get(method, (None, None))
        if known is handler:
            return guarded
        guarded = self._guard(handler, method.removeprefix("/"))
        if handler.request_deserializer is not None:  # A handler that refuses one call without parsing it is not kept.
            self._guarded[method] = handler, guarded
        return guarded

    def _guard(self, handler: Any, method: str) -> Any:
        parse = handler.request_deserializer or bytes
        if handler.request_streaming:
            return _rebuilt(handler, _guard_bidi(handler.stream_stream, parse))
        if handler.response_streaming:
            return _rebuilt(handler, _guard_stream(handler.unary_stream, parse))
        return _rebuilt(handler, _guard_unary(self._measured(handler.unary_unary, method), parse))

    def _measured(self, behavior: Any, method: str) -> Any:
        traced = method.partition("/")[0] in self._traced

        async def measured(request: Any, context: Any) -> Any:
            metadata = context.invocation_metadata() if traced else ()
            parent = next((str(value) for key, value in metadata or () if key == "traceparent"), "")
            with _CallMetrics(self._seconds, method, parent):
                return await behavior(request, context)

        return measured


def _rebuilt(handler: Any, behavior: Any) -> Any:
    """A handler of the same kind (unary or streaming) that calls `behavior` with unparsed requests."""
    rebuild = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return rebuild(behavior, response_serializer=handler.response_serializer)


def refusing(handler: Any, error: WeftError) -> Any:
    """A handler of the same kind that reads nothing and fails with `error`."""

    async def refuse(request: object, context: object) -> None:
        raise error

    return _rebuilt(handler, refuse)


def _spans() -> metrics.Series:
    return metrics.by_label(telemetry.spans().items())


class _CallMetrics:
    """A `with` block around one unary call that records its duration, its status code and, if traced, its span."""

    def __init__(self, seconds: metrics.Histogram, method: str, parent: str) -> None:
        self._seconds = seconds
        self._method = method
        self._span = telemetry.start(method, parent, kind="server", attributes=_GRPC) if parent else None
        self._began = time.monotonic()

    def __enter__(self) -> None:
        """Starts nothing: the call began with the constructor."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = _code(error)
        self._seconds.observe(time.monotonic() - self._began, self._method, code)
        if self._span is not None:
            self._span.set({"rpc.method": self._method, "rpc.response.status_code": code})
            if code != "OK":
                self._span.fail(code)
            self._span.end()


def _code(error: BaseException | None) -> str:
    """The status code that a handler's exception is converted to."""
    if error is None:
        return "OK"
    if isinstance(error, WeftError):
        return error.code.name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"


def _guard_unary(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(request: bytes, context: aio.ServicerContext[Any, Any]) -> Any:
        async with _ErrorToStatus(context):
            return await behavior(_parsed(parse, request), context)

    return guarded


def _guard_stream(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        async with _ErrorToStatus(context):
            answers = behavior(_parsed(parse, request), context)
            if hasattr(answers, "__aiter__"):
                answers = _write_all(answers, context)
            await answers

    return guarded


def _guard_bidi(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(requests: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> None:
        async def parsed() -> AsyncIterator[Any]:
            async for request in requests:
                yield _parsed(parse, request)

        async with _ErrorToStatus(context):
            answers = behavior(parsed(), context)
            if hasattr(answers, "__aiter__"):
                answers = _write_all(answers, context)
            await answers

    return guarded


def _parsed(parse: Callable[[bytes], Any], request: bytes) -> Any:
    try:
        return parse(request)
    except (DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        raise WeftError(
            grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the request is not a message of this method"
        ) from None


async def _write_all(answers: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> None:
    """Writes what a handler yields. Other streaming handlers write to the context themselves."""
    async for answer in answers:
        await context.write(answer)


class _ErrorToStatus:
    """An `async with` block around a handler that converts its exception to the status of the call."""

    def __init__(self, context: aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        """Starts nothing."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, WeftError):
            await _abort(self._context, error)
        elif isinstance(error, Exception) and not isinstance(error, aio.AbortError):
            telemetry.log_exception("unexpected exception in a handler", error)
            await _abort(self._context, errors.internal())


async def _abort(context: aio.ServicerContext[Any, Any], error: WeftError) -> None:
    status: Any = error.status()
    kept = tuple(context.trailing_metadata() or ())
    await context.abort(status.code, status.details, kept + tuple(status.trailing_metadata))
