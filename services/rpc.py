"""gRPC servers with health and reflection, channels between services, and the life of a service's process.

Knows gRPC, nothing of the services.
"""

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError
from pydantic_settings import SettingsError

from services import metrics, telemetry
from services.calls import server as calls
from services.calls.interceptor import Check, ErrorInterceptor
from services.calls.wakeups import read_together
from services.errors import WeftError
from services.hang_watch import LoopCheck, watching
from services.process import refuse_to_serve
from services.security import identity as identities
from services.security import mesh_id as mesh_ids
from services.security.authorization import RoleInterceptor
from services.security.identity import NOBODY, Identity
from services.security.mesh_id import MeshCheck
from services.security.roles import Role, role_name

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
    # Unused, and both cost time for each message.
    ("grpc.per_message_compression", 0),
    ("grpc.enable_channelz", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Beyond 1,000 calls that Python has not accepted yet, gRPC would cancel calls without any status; after 30 s, too.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
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
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    # Each channel has its own connection, so that a stalled link blocks no other.
    ("grpc.use_local_subchannel_pool", 1),
]
FEW_UNREAD_BYTES = 16 << 10
"""Bytes of some fifty messages with the tokens of a step."""


UNPROTECTED_HELP = (
    "see SECURITY.md, or set WEFT_ALLOW_UNPROTECTED=true if everybody who reaches it may read and forge everything"
)


@dataclass(frozen=True, slots=True)
class PublicDoor:
    """How a port for clients is protected."""

    credentials: grpc.ServerCredentials | None
    """None: the port is plain."""
    authenticated: bool
    """Callers need a key."""

    @property
    def protected(self) -> bool:
        """Encrypted, and callers need a key."""
        return self.credentials is not None and self.authenticated


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

    async def set_health(self, name: str, ready: bool) -> None:
        """Sets the health of a name that is not a service."""
        states = health_pb2.HealthCheckResponse
        await self._checks.set(name, states.SERVING if ready else states.NOT_SERVING)

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
    allow_unprotected: bool = False,
    identity: Identity = NOBODY,
    public: PublicDoor | None = None,
    counts: metrics.Metrics | None = None,
    metrics_port: int = 0,
    checks: Sequence[Check] = (),
    mesh_id: str = "",
    shares_port: bool = False,
    gate: calls.Gate | None = None,
    options: Sequence[tuple[str, int]] = (),
    own_address: str = "",
) -> Server:
    """Starts a server at host:port; port 0 takes a free port. Its services are NOT_SERVING until `ready` is called.

    The metrics of unary calls and of spans are added to `counts`, which `metrics_port` serves unless it is 0. Requests
    larger than `max_message_bytes` are answered by gRPC with RESOURCE_EXHAUSTED. With `shares_port` other
    processes of this user may listen at the same port.

    A port for the mesh has the credentials of `identity`, if that has any, and permits what `authorization.MATRIX`
    does. A port for clients is described by `public` instead, and its `checks` authenticate them. The process
    ends with one line on stderr if a port is taken, or if the address is not loopback, the port is not both encrypted
    and authenticated, and `allow_unprotected` is false.

    `checks` run before each call; an error that they raise becomes the status of the call. `gate` refuses calls before
    everything else. `options` are further channel arguments. `own_address` is another address of this machine, without
    encryption, for calls of this process. Health answers carry `mesh_id` as initial metadata, and calls whose metadata
    names another mesh are refused.
    """
    protected = public.protected if public is not None else identity.protected
    check_address(address, protected, allow_unprotected)
    credentials = public.credentials if public is not None else identity.server()
    given = {name for name, _ in options}  # Of two values for one argument gRPC takes the first one.
    arguments = [
        *(option for option in _SERVER_OPTIONS if option[0] not in given),
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        *options,
    ]
    counts = counts or metrics.Metrics()
    counts.gauge("weft_event_loop_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    services = list(services)
    traced = frozenset(service.name for service in services if service.traced)
    roles = [RoleInterceptor()] if public is None and identity.protected else []
    errors = ErrorInterceptor(counts, traced, [MeshCheck(mesh_id), *checks])
    server = calls.server([errors, *roles], arguments, gate)
    states = _Health(mesh_id)
    names = []
    for service in services:
        service.add(service.servicer, server)
        names.append(service.name)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    if not shares_port:
        _refuse_taken(address)
    port = _listen(server, address, credentials)
    if own_address:
        server.add_insecure_port(own_address)
    metrics_server = _serve_metrics(counts, address, metrics_port) if metrics_port else None
    await server.start()
    result = Server(server, states, names, port, metrics_server)
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

    async def List(self, request: Any, context: Any) -> Any:
        """Not offered. Raises WeftError."""
        raise WeftError(grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_OFFERED", "use Check: names are not listed")


def _refuse_taken(address: str) -> None:
    """Ends the process with exit code 1 if the port is taken. gRPC, which would find it, too, prints further lines."""
    host = host_of(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(address.rpartition(":")[2])))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                sys.exit(f"weft: cannot listen at {address}: another process may use the port")


def _listen(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Binds the address and returns the port. If it is taken, the process ends with exit code 1."""
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError:
        sys.exit(f"weft: cannot listen at {address}: another process may use the port")


def _serve_metrics(counts: metrics.Metrics, address: str, port: int) -> metrics.MetricsServer:
    """Serves metrics at this port on the host of `address`."""
    try:
        return metrics.MetricsServer(counts.rendered, host_of(address), port)
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


def check_address(address: str, protected: bool, allow_unprotected: bool) -> None:
    """Ends the process with one line on stderr unless host:port is loopback, protected, or permitted without it."""
    host, port = host_of(address), address.rpartition(":")[2]
    if ":" not in address or not port.isdecimal() or int(port) > _MOST_PORT:
        refuse_to_serve(f"{address} is not host:port")
    if not (protected or allow_unprotected or is_loopback(host)):
        refuse_to_serve(f"{address} is open to other machines, without TLS and authentication: {UNPROTECTED_HELP}")


def link_channel(
    address: str,
    peer: Role | None = None,
    identity: Identity | None = None,
    *,
    connect_s: float = 0.1,
    unread_bytes: int | None = None,
) -> aio.Channel:
    """A channel with its own connection to a service whose role is `peer`: a server of another role is refused.

    `identity` is that of the process unless it is given. Without credentials the connection is plain. One attempt to
    connect may take `connect_s` or longer. `unread_bytes`: most bytes of a stream's messages that are received before
    they are read, but for a larger one; None: gRPC chooses, and takes megabytes. The others wait at the peer, which can
    join them. Raises ValueError if there are credentials and no `peer`.
    """
    options: list[tuple[str, str | int]] = [*_LINK_OPTIONS, ("grpc.min_reconnect_backoff_ms", int(1e3 * connect_s))]
    if unread_bytes is not None:
        options += [("grpc.http2.lookahead_bytes", unread_bytes), ("grpc.http2.bdp_probe", 0)]
    credentials = (identity or identities.current()).client()
    if credentials is None:
        return aio.insecure_channel(address, options=options)
    if peer is None:
        raise ValueError("an encrypted connection needs the role of its peer")
    options.append(("grpc.ssl_target_name_override", role_name(peer)))
    return aio.secure_channel(address, credentials, options=options)


def stop_requested() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def _variable(place: Sequence[int | str]) -> Iterator[str]:
    """The environment variable of a setting that pydantic names by its field or its variable."""
    for part in map(str, place):
        yield f"WEFT_{part.upper()}" if part.islower() else part


def run(main: Awaitable[None]) -> None:
    """Runs a service on uvloop until it ends; invalid settings end the process with one line on stderr."""
    import uvloop

    async def entry() -> None:
        read_together(asyncio.get_running_loop())
        with watching(LoopCheck(asyncio.get_running_loop())):
            await main

    try:
        uvloop.run(entry())
    except ValidationError as error:  # Name the setting and the reason, but not the value, which may be a secret.
        reasons = (": ".join([*_variable(item["loc"]), item["msg"]]) for item in error.errors(include_input=False))
        refuse_to_serve(f"settings: {'; '.join(reasons)}")
    except SettingsError as error:  # A list or mapping is not valid JSON; the text contains no value.
        refuse_to_serve(f"settings: {error}")
    finally:
        telemetry.close()
