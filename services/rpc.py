"""How every service listens and calls: servers with health and reflection, channels, the exception boundary.

Knows gRPC, and how calls are counted and traced; nothing of what is served.
"""

import asyncio
import contextlib
import gc
import ipaddress
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError
from pydantic_settings import SettingsError

from services import errors, metrics, telemetry
from services.errors import WeftError

log = structlog.get_logger("rpc")
Message = TypeVar("Message")

PUBLIC_MESSAGE_BYTES = 1 << 20
INTERNAL_MESSAGE_BYTES = 16 << 20
_MOST_PORT = 65_535

# Clients may ping a quiet connection as often as twice a second: they see a hung peer within about a second.
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    # Nobody asks for either, and both cost at each message.
    ("grpc.per_message_compression", 0),
    ("grpc.enable_channelz", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 32 << 10),
]
_LINK_OPTIONS = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    # Each link owns its connection, so that a stalled one blocks no other.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer and where it belongs: `add` is the generated add_..._to_server, `name` the full proto name."""

    name: str
    add: Callable[[Any, aio.Server], None]
    servicer: Any
    traced: bool = False
    """Whether a unary call that brings a trace context is a span of that trace."""


class Server:
    """A listening server: health by service name, reflection, graceful stop."""

    def __init__(
        self,
        server: aio.Server,
        checks: health.aio.HealthServicer,
        names: list[str],
        port: int,
        scrapes: metrics.Scrapes | None,
    ) -> None:
        self._server = server
        self._checks = checks
        self._names = names
        self._scrapes = scrapes
        self.port = port

    async def ready(self, ready: bool = True) -> None:
        """Tells health checks whether calls are welcome, by the names of the services.

        The name "" answers SERVING from the first moment to the stop: it says that this process listens, and a
        liveness probe must not restart one that loads a model, or waits for one.
        """
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._checks.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Says NOT_SERVING, refuses new calls, gives those under way `grace_s` seconds."""
        await self._checks.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._scrapes is not None:
            await self._scrapes.close()


async def serve(
    address: str,
    services: Iterable[Service],
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    allow_remote: bool = False,
    counts: metrics.Metrics | None = None,
    metrics_port: int = 0,
    gates: Sequence[aio.ServerInterceptor] = (),
) -> Server:
    """Listens at host:port (port 0 takes a free one). Its services are NOT_SERVING until `ready` is called.

    `counts` get those of unary calls and of spans beside what the service counts itself; at `metrics_port`, unless it
    is 0, Prometheus reads them. If a port is taken the process ends with a line that says so; so it does for an
    address beyond loopback unless `allow_remote`: the mesh does not authenticate its callers.

    `gates` are asked before each call; what they raise becomes its status.
    """
    _check_address(address, allow_remote)
    options = [
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    ]
    counts = counts or metrics.Metrics()
    services = list(services)
    traced = frozenset(service.name for service in services if service.traced)
    server = aio.server(interceptors=[Boundary(counts, traced), *gates], options=options)
    checks = health.aio.HealthServicer()
    names = []
    for service in services:
        service.add(service.servicer, server)
        names.append(service.name)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = _listen(server, address)
    scrapes = _scrapes(counts, address, metrics_port) if metrics_port else None
    await server.start()
    result = Server(server, checks, names, port, scrapes)
    await result.ready(False)
    return result


def _listen(server: aio.Server, address: str) -> int:
    """The port that it got. If that is taken, the process ends with a line that says so, and may be tried again."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        sys.exit(f"weft: {address} cannot be listened at: another process may have it")


def _scrapes(counts: metrics.Metrics, address: str, port: int) -> metrics.Scrapes:
    """Lets Prometheus read at this port, on the host of `address` and by its rules."""
    try:
        return metrics.Scrapes(counts, _host(address), port)
    except OSError as error:
        refuse_to_serve(f"WEFT_METRICS_PORT {port}: {error.strerror}")


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _check_address(address: str, allow_remote: bool) -> None:
    host, port = _host(address), address.rpartition(":")[2]
    if ":" not in address or not port.isdecimal() or int(port) > _MOST_PORT:
        refuse_to_serve(f"{address} is not host:port")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not allow_remote:
        refuse_to_serve(f"{address} is open to other machines: set WEFT_ALLOW_REMOTE=true if its network is trusted")


def link_channel(address: str) -> aio.Channel:
    """A channel between services, with a connection of its own."""
    return aio.insecure_channel(address, options=_LINK_OPTIONS)


class Boundary(aio.ServerInterceptor):
    """Around every handler: bytes that are not the message are INVALID_ARGUMENT, errors become rich statuses, and the
    text of an unexpected exception never leaves the process. Unary calls are counted, and traced where `traced` names
    their service."""

    def __init__(self, counts: metrics.Metrics, traced: frozenset[str] = frozenset()) -> None:
        self._traced = traced
        self._guarded: dict[str, tuple[Any, Any]] = {}
        self._seconds = counts.histogram(
            "weft_rpc_seconds", "Unary calls by method and status code.", metrics.SHORT_S, "method", "code"
        )
        counts.total("weft_trace_spans", "Spans by what became of them.", _spans, "outcome")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = str(handler_call_details.method)
        known, guarded = self._guarded.get(method, (None, None))
        if known is handler:
            return guarded
        guarded = self._guard(handler, method.removeprefix("/"))
        if handler.request_deserializer is not None:  # What refuses a call unread, and knows it, is not kept.
            self._guarded[method] = handler, guarded
        return guarded

    def _guard(self, handler: Any, method: str) -> Any:
        parse = handler.request_deserializer or bytes
        styles: dict[tuple[bool, bool], tuple[str, Any, Any]] = {
            (False, False): ("unary_unary", _guard_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", _guard_stream, grpc.unary_stream_rpc_method_handler),
            (True, True): ("stream_stream", _guard_bidi, grpc.stream_stream_rpc_method_handler),
        }
        attribute, guard, rebuild = styles[handler.request_streaming, handler.response_streaming]
        behavior = getattr(handler, attribute)
        if guard is _guard_unary:
            behavior = self._watched(behavior, method)
        return rebuild(guard(behavior, parse), response_serializer=handler.response_serializer)

    def _watched(self, behavior: Any, method: str) -> Any:
        traced = method.partition("/")[0] in self._traced

        async def watched(request: Any, context: Any) -> Any:
            metadata = context.invocation_metadata() if traced else ()
            parent = next((str(value) for key, value in metadata or () if key == "traceparent"), "")
            with _Watch(self._seconds, method, parent):
                return await behavior(request, context)

        return watched


def _spans() -> metrics.Series:
    return metrics.by_label(telemetry.spans().items())


class _Watch:
    """A `with` block around one unary call: how long it took, how it ended and, if its caller is traced, its span."""

    def __init__(self, seconds: metrics.Histogram, method: str, parent: str) -> None:
        self._seconds = seconds
        self._method = method
        self._span = telemetry.start(method, parent, kind="server", attributes=_GRPC) if parent else None
        self._began = time.monotonic()

    def __enter__(self) -> None:
        """Begins."""

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


_GRPC: telemetry.Attributes = {"rpc.system.name": "grpc"}


def _code(error: BaseException | None) -> str:
    """The status code that a handler's exception becomes."""
    if error is None:
        return "OK"
    if isinstance(error, WeftError):
        return error.code.name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"


def _guard_unary(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(request: bytes, context: aio.ServicerContext[Any, Any]) -> Any:
        async with _Caught(context):
            return await behavior(_parsed(parse, request), context)

    return guarded


def _guard_stream(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        async with _Caught(context):
            await _drive(behavior(_parsed(parse, request), context), context)

    return guarded


def _guard_bidi(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(requests: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> None:
        async def parsed() -> AsyncIterator[Any]:
            async for request in requests:
                yield _parsed(parse, request)

        async with _Caught(context):
            await _drive(behavior(parsed(), context), context)

    return guarded


def _parsed(parse: Callable[[bytes], Any], request: bytes) -> Any:
    try:
        return parse(request)
    except (DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        raise WeftError(
            grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the request is not a message of this method"
        ) from None


async def _drive(answers: Any, context: aio.ServicerContext[Any, Any]) -> None:
    """Runs a handler of either style: one that writes to the context, or an async generator."""
    if hasattr(answers, "__aiter__"):
        async for answer in answers:
            await context.write(answer)
    else:
        await answers


class _Caught:
    """An `async with` block around a handler: what it raises becomes the status of its call."""

    def __init__(self, context: aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        """Begins."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, WeftError):
            await _abort(self._context, error)
        elif isinstance(error, Exception) and not isinstance(error, aio.AbortError):
            log_exception("unexpected exception", error)
            await _abort(self._context, errors.internal())


async def _abort(context: aio.ServicerContext[Any, Any], error: WeftError) -> None:
    status: Any = error.status()
    kept = tuple(context.trailing_metadata() or ())
    await context.abort(status.code, status.details, kept + tuple(status.trailing_metadata))


def log_exception(event: str, error: BaseException) -> None:
    """Logs where an exception came from, by type and line: its text may hold what a client sent."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    log.error(event, type=type(error).__name__, frames=frames[-6:])


class OutboxFull(Exception):
    """The reader of a link is too slow: the link must be closed."""


class Outbox(Generic[Message]):
    """What waits to be written to one link. Putting never waits, so a stalled reader delays nobody else."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._closed = False
        self._news: asyncio.Future[None] | None = None

    def put(self, message: Message) -> None:
        """Adds a message; after `close` nobody reads it. Raises OutboxFull when the link is `limit` messages behind."""
        if self._closed:
            return
        if len(self._messages) >= self._limit:
            raise OutboxFull
        self._messages.append(message)
        self._tell()

    def close(self) -> None:
        """Ends the iteration once what is queued has been taken."""
        self._closed = True
        self._tell()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._closed:
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def stop_requested() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def settled() -> None:
    """To be called when a process begins to serve: what it has made so far stays to its end, so the collector, which
    stops all threads (150 ms for what a worker imports), need not look at it again."""
    gc.collect()
    gc.freeze()


def run(main: Awaitable[None]) -> None:
    """Runs a service until it ends, on uvloop."""
    import uvloop

    async def entry() -> None:
        await main

    try:
        uvloop.run(entry())
    except ValidationError as error:  # Settings: say which one and why, but never a value, which may be a secret.
        reasons = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False))
        refuse_to_serve(f"settings: {'; '.join(reasons)}")
    except SettingsError as error:  # What should be a list is no JSON; it does not say what it is instead.
        refuse_to_serve(f"settings: {error}")
    finally:
        telemetry.close()


def refuse_to_serve(reason: str) -> NoReturn:
    """Ends the process with one line on stderr and the exit code that tells a supervisor not to try again."""
    print(f"weft: {reason}", file=sys.stderr)
    sys.exit(os.EX_CONFIG)
