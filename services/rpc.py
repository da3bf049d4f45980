"""gRPC servers with health and reflection, channels between services, and the life of a service's process.

Knows gRPC, nothing of the services.
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

from services import mesh_id as mesh_ids
from services import metrics, telemetry
from services.interceptor import ErrorInterceptor
from services.mesh_id import MeshInterceptor
from services.process import refuse_to_serve

PUBLIC_MESSAGE_BYTES = 1 << 20
"""Largest request that the gateway's gRPC server accepts: 1 MiB, serialized.

gRPC itself answers a larger one before any handler runs: RESOURCE_EXHAUSTED, "Received message larger than max (SIZE
vs. 1048576)", without an ErrorInfo. A client must shorten such a request rather than repeat it. Answers may have up to
INTERNAL_MESSAGE_BYTES."""
INTERNAL_MESSAGE_BYTES = 16 << 20
"""Largest message between services, and largest answer of the gateway: 16 MiB, serialized."""
_MOST_PORT = 65_535

# Clients may ping an idle connection twice a second, and so detect a hung peer within about a second.
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    # Unused, and both cost time for each message.
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
    # Each channel has its own connection, so that a stalled link blocks no other.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer to serve: `add` is the generated add_..._to_server, `name` the full proto name."""

    name: str
    add: Callable[[Any, aio.Server], None]
    servicer: Any
    traced: bool = False
    """Whether a unary call whose caller sends a trace context is recorded as a span."""


class Server:
    """A listening server: health by service name, reflection, graceful stop."""

    def __init__(
        self,
        server: aio.Server,
        checks: health.aio.HealthServicer,
        names: list[str],
        port: int,
        metrics_server: metrics.MetricsServer | None,
    ) -> None:
        self._server = server
        self._checks = checks
        self._names = names
        self._metrics_server = metrics_server
        self.port = port

    async def ready(self, ready: bool = True) -> None:
        """Sets the health of the services: SERVING or NOT_SERVING.

        The health of the name "" is SERVING from the start to the stop: it means that the process listens. A liveness
        probe of that name does not restart a process that loads a model or waits for one.
        """
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._checks.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Sets the health to NOT_SERVING, refuses new calls, and cancels running calls after `grace_s` seconds."""
        await self._checks.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._metrics_server is not None:
            await self._metrics_server.close()


async def serve(
    address: str,
    services: Iterable[Service],
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    allow_remote: bool = False,
    counts: metrics.Metrics | None = None,
    metrics_port: int = 0,
    interceptors: Sequence[aio.ServerInterceptor] = (),
    mesh_id: str = "",
) -> Server:
    """Starts a server at host:port; port 0 takes a free port. Its services are NOT_SERVING until `ready` is called.

    The metrics of unary calls and of spans are added to `counts`, which `metrics_port` serves unless it is 0. The
    process ends with one line on stderr if a port is taken or if the address is not loopback and `allow_remote` is
    false: services do not authenticate their callers. Requests larger than `max_message_bytes` are answered by gRPC
    with RESOURCE_EXHAUSTED.

    `interceptors` run before each call; an error that they raise becomes the status of the call. Health answers carry
    `mesh_id` as initial metadata, and calls whose metadata names another mesh are refused.
    """
    check_address(address, allow_remote)
    options = [
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    ]
    counts = counts or metrics.Metrics()
    services = list(services)
    traced = frozenset(service.name for service in services if service.traced)
    every = [ErrorInterceptor(counts, traced), MeshInterceptor(mesh_id), *interceptors]
    server = aio.server(interceptors=every, options=options)
    checks = _Health(mesh_id)
    names = []
    for service in services:
        service.add(service.servicer, server)
        names.append(service.name)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = _listen(server, address)
    metrics_server = _serve_metrics(counts, address, metrics_port) if metrics_port else None
    await server.start()
    result = Server(server, checks, names, port, metrics_server)
    await result.ready(False)
    return result


class _Health(health.aio.HealthServicer):
    """The gRPC health service, whose answers to Check carry the id of the mesh as initial metadata."""

    def __init__(self, mesh_id: str) -> None:
        super().__init__()
        self._metadata = mesh_ids.metadata(mesh_id)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """As in the protocol of gRPC health checks."""
        await context.send_initial_metadata(self._metadata)
        return await super().Check(request, context)


def _listen(server: aio.Server, address: str) -> int:
    """Binds the address and returns the port. If it is taken, the process ends with exit code 1."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        sys.exit(f"weft: cannot listen at {address}: another process may use the port")


def _serve_metrics(counts: metrics.Metrics, address: str, port: int) -> metrics.MetricsServer:
    """Serves metrics at this port on the host of `address`."""
    try:
        return metrics.MetricsServer(counts, host_of(address), port)
    except OSError as error:
        refuse_to_serve(f"WEFT_METRICS_PORT {port}: {error.strerror}")


def host_of(address: str) -> str:
    """The host of host:port, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at this host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def check_address(address: str, allow_remote: bool) -> None:
    """Ends the process with one line on stderr unless host:port is loopback or `allow_remote` is true."""
    host, port = host_of(address), address.rpartition(":")[2]
    if ":" not in address or not port.isdecimal() or int(port) > _MOST_PORT:
        refuse_to_serve(f"{address} is not host:port")
    if not allow_remote and not is_loopback(host):
        refuse_to_serve(f"{address} is open to other machines: set WEFT_ALLOW_REMOTE=true if the network is trusted")


def link_channel(address: str) -> aio.Channel:
    """A channel between services with its own connection."""
    return aio.insecure_channel(address, options=_LINK_OPTIONS)


def stop_requested() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def settled() -> None:
    """Excludes all current objects from garbage collection; to be called when a process starts to serve.

    They live as long as the process, and a full collection stops all threads (150 ms for the imports of a worker).
    """
    gc.collect()
    gc.freeze()


def run(main: Awaitable[None]) -> None:
    """Runs a service on uvloop until it ends; invalid settings end the process with one line on stderr."""
    import uvloop

    async def entry() -> None:
        await main

    try:
        uvloop.run(entry())
    except ValidationError as error:  # Name the setting and the reason, but not the value, which may be a secret.
        reasons = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False))
        refuse_to_serve(f"settings: {'; '.join(reasons)}")
    except SettingsError as error:  # A list or mapping is not valid JSON; the text contains no value.
        refuse_to_serve(f"settings: {error}")
    finally:
        telemetry.close()
