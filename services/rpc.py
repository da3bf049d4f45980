"""How every service listens and calls: servers with health and reflection, channels, the exception boundary.

Knows gRPC, nothing of what is served.
"""

import asyncio
import contextlib
import ipaddress
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError

from services import errors
from services.errors import WeftError

log = structlog.get_logger("rpc")
Message = TypeVar("Message")

PUBLIC_MESSAGE_BYTES = 1 << 20
INTERNAL_MESSAGE_BYTES = 16 << 20

# Clients may ping a quiet connection as often as twice a second: they see a hung peer within about a second.
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
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


class Server:
    """A listening server: health by service name, reflection, graceful stop."""

    def __init__(self, server: aio.Server, checks: health.aio.HealthServicer, names: list[str], port: int) -> None:
        self._server = server
        self._checks = checks
        self._names = names
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


async def serve(
    address: str,
    services: Iterable[Service],
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    allow_remote: bool = False,
) -> Server:
    """Listens at host:port (port 0 takes a free one). Its services are NOT_SERVING until `ready` is called.

    Raises ValueError for an address beyond loopback unless `allow_remote`: the mesh does not authenticate its callers.
    """
    _check_address(address, allow_remote)
    options = [
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    ]
    server = aio.server(interceptors=[Boundary()], options=options)
    checks = health.aio.HealthServicer()
    names = []
    for service in services:
        service.add(service.servicer, server)
        names.append(service.name)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = server.add_insecure_port(address)
    await server.start()
    result = Server(server, checks, names, port)
    await result.ready(False)
    return result


def _check_address(address: str, allow_remote: bool) -> None:
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not allow_remote:
        raise ValueError(f"{address} is open to other machines: set WEFT_ALLOW_REMOTE=true if its network is trusted")


def link_channel(address: str) -> aio.Channel:
    """A channel between services, with a connection of its own."""
    return aio.insecure_channel(address, options=_LINK_OPTIONS)


class Boundary(aio.ServerInterceptor):
    """Around every handler: bytes that are not the message are INVALID_ARGUMENT, errors become rich statuses, and the
    text of an unexpected exception never leaves the process."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        parse = handler.request_deserializer or bytes
        styles: dict[tuple[bool, bool], tuple[str, Any, Any]] = {
            (False, False): ("unary_unary", _guard_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", _guard_stream, grpc.unary_stream_rpc_method_handler),
            (True, True): ("stream_stream", _guard_bidi, grpc.stream_stream_rpc_method_handler),
        }
        attribute, guard, rebuild = styles[handler.request_streaming, handler.response_streaming]
        guarded = guard(getattr(handler, attribute), parse)
        return rebuild(guarded, response_serializer=handler.response_serializer)


def _guard_unary(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(request: bytes, context: aio.ServicerContext[Any, Any]) -> Any:
        async with _boundary(context):
            return await behavior(_parsed(parse, request), context)

    return guarded


def _guard_stream(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        async with _boundary(context):
            await _drive(behavior(_parsed(parse, request), context), context)

    return guarded


def _guard_bidi(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    async def guarded(requests: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> None:
        async def parsed() -> AsyncIterator[Any]:
            async for request in requests:
                yield _parsed(parse, request)

        async with _boundary(context):
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


@contextlib.asynccontextmanager
async def _boundary(context: aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    try:
        yield
    except (asyncio.CancelledError, aio.AbortError):
        raise
    except WeftError as error:
        await _abort(context, error)
    except Exception as error:
        log_exception("unexpected exception", error)
        await _abort(context, errors.internal())


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
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue(limit)

    def put(self, message: Message) -> None:
        """Adds a message. Raises OutboxFull when the link is `limit` messages behind."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            raise OutboxFull from None

    def close(self) -> None:
        """Ends the iteration once, or instead of, what is queued."""
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message


def stop_requested() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


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


def refuse_to_serve(reason: str) -> NoReturn:
    """Ends the process with one line on stderr and the exit code that tells a supervisor not to try again."""
    print(f"weft: {reason}", file=sys.stderr)
    sys.exit(os.EX_CONFIG)
