"""How every service listens and calls: servers with health and reflection, channels, the life of a process.

Knows gRPC, nothing of what is served.
"""

import asyncio
import contextlib
import gc
import ipaddress
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError
from pydantic_settings import SettingsError

from services import metrics, telemetry
from services.interceptor import ErrorInterceptor
from services.process import refuse_to_serve

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
    server = aio.server(interceptors=[ErrorInterceptor(counts, traced), *gates], options=options)
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
