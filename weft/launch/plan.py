"""Plans the whole mesh on one machine: processes, addresses, settings, Redis.

Knows how the services are started and asked whether they are ready, never what they do.
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services import rpc
from services.cache.embedded import EmbeddedRedis
from services.security import mesh_id as mesh_ids
from services.security.door_tls import CERT, KEY
from services.security.roles import Role
from services.settings import (
    CACHE_ADDRESS,
    GATEWAY_ADDRESS,
    HTTP_PORT,
    SCHEDULER_ADDRESS,
    WORKER_ADDRESS,
    CommonSettings,
)
from weft.launch import devices
from weft.launch.home import Home, locked_home
from weft.launch.ports import HeldPorts
from weft.launch.reach import PLAIN, Reach, reach
from weft.launch.supervisor import ProcessSpec

HOST = "127.0.0.1"
HTTP_PORT_SETTING = "WEFT_GATEWAY_HTTP_PORT"
PROCESSES_SETTING = "WEFT_GATEWAY_PROCESSES"
_WILDCARDS = {"0.0.0.0": HOST, "::": "::1"}
_CHECK_S = 1.0
_MOST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """The mesh that is asked for."""

    models: Sequence[str]
    """Folders of checkpoints, or their names on the hub."""
    home: Path
    """Where data and logs are kept; a subfolder of it if another mesh runs there."""
    workers: int = 1
    """Workers of each model."""
    roles: Sequence[str] = ()
    """What they are for, in turn; none: what their environment says."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names, each with the name (the last part of the folder) of the model that it stands for."""
    adapters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """NAME=FOLDER of the adapters of each model, by the model's name."""
    redis_url: str = ""
    """Empty: the embedded Redis."""
    host: str = HOST
    """The host that the gateway listens at. Everything else listens at the loopback interface."""
    port: int | None = None
    """The gateway's port; None: its default."""
    http_port: int | None = None
    """The gateway's port for HTTP, 0 for none; None: WEFT_GATEWAY_HTTP_PORT, else the default one or, if that is taken,
    a free one."""
    gateways: int | None = None
    """Gateway processes that share the ports; None: WEFT_GATEWAY_PROCESSES, else as many as the cores allow."""
    free_ports: bool = False
    """Take free ports for everything instead of the default ones."""
    plain: bool = False
    """Services connect without TLS and authentication, where nothing names a secret: for measurements."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of all processes."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The processes of a mesh in the order of their start, and what they share."""

    specs: Sequence[ProcessSpec]
    mesh_id: str
    reach: Reach
    """How this process reaches the ports of the mesh."""
    address: str
    """host:port at which this machine reaches the gateway."""
    listen: str
    """host:port at which the gateway listens."""
    http_address: str
    """host:port at which this machine reaches the gateway over HTTP; empty for none."""
    redis: str
    """Which Redis is used, to be printed: without a password."""
    home: Path
    """Where this mesh keeps its data and logs."""
    tools: str
    """A command that reaches the inner ports of this mesh; empty: it needs no more than its defaults."""
    ports: HeldPorts
    """The ports of the mesh; further ones may be taken."""


class CannotServe(Exception):
    """The mesh cannot be started; the message is one line."""


class PortTaken(CannotServe):
    """The gateway's port is in use."""


class OpenToOthers(CannotServe):
    """The gateway would be open to other machines without leave."""


@contextlib.asynccontextmanager
async def planned(spec: MeshSpec) -> AsyncIterator[MeshPlan]:
    """The plan of a mesh, whose ports and folder are held until the block ends. Raises CannotServe and NoRedisError."""
    _check_host(spec.host)
    _check_redis_url(spec.redis_url)
    with HeldPorts() as ports:
        addresses, http_port = _addresses(spec, ports)
        async with contextlib.AsyncExitStack() as stack:
            try:
                home = await stack.enter_async_context(locked_home(spec.home))
                mesh = _plan(spec, home, ports, addresses, http_port)
            except OSError as error:
                raise CannotServe(f"{error.filename or spec.home}: {error.strerror}: see WEFT_HOME") from None
            yield mesh


def _plan(spec: MeshSpec, home: Home, ports: HeldPorts, addresses: list[str], http_port: str) -> MeshPlan:
    listen, scheduler, cache, *workers = addresses
    mesh_id = {**os.environ, **spec.settings}.get("WEFT_MESH_ID") or secrets.token_hex(8)
    own_reach, secret = reach(spec.settings, home.folder, spec.plain)
    redis_url, redis, specs = _redis(spec, home)
    environment = {
        **spec.settings,
        **secret,
        "WEFT_MESH_ID": mesh_id,
        "WEFT_SCHEDULER_ADDRESS": scheduler,
        "WEFT_CACHE_ADDRESS": cache,
        "PYTHONUNBUFFERED": "1",
    }
    first_port = {**os.environ, **spec.settings}.get("WEFT_METRICS_PORT") or "0"

    def with_metrics(place: int) -> dict[str, str]:
        """The environment of the process at this place, with a port of its own for Prometheus if ports are wanted. The
        process refuses a value that is no number."""
        counts = first_port.isdecimal() and int(first_port) > 0
        return {**environment, "WEFT_METRICS_PORT": str(int(first_port) + place) if counts else first_port}

    def service(name: str, module: Role, listen: str, own: Mapping[str, str], reached_at: str = "") -> None:
        ready = serving(reached_at or listen, _HEALTH_NAMES[module], mesh_id, own_reach)
        command = [sys.executable, "-m", f"services.{module}"]
        specs.append(ProcessSpec(name, command, ready, {**own, "WEFT_LISTEN": listen}))

    service("cache", "cache", cache, {**with_metrics(2), "WEFT_REDIS_URL": redis_url})
    service("scheduler", "scheduler", scheduler, with_metrics(1))
    threads = str(max(1, (os.cpu_count() or 1) // len(workers)))
    gpus, ranks = devices.gpus({**os.environ, **spec.settings}) if len(workers) > 1 else [], _ranks(spec.settings)
    for number, address in enumerate(workers, 1):
        model = spec.models[(number - 1) // spec.workers]
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "MODEL_NAME": model}
        own |= devices.visible_to(number - 1, ranks, gpus)
        if len(spec.models) > 1:
            own["WEFT_SETTINGS_SHARED"] = "true"
        if spec.roles:
            own["WEFT_ROLE"] = spec.roles[(number - 1) % spec.workers % len(spec.roles)]
        aliases = [alias for alias, name in spec.aliases.items() if name == model_name(model)]
        if aliases:
            own["WEFT_ALIASES"] = json.dumps(aliases)
        if spec.adapters.get(model_name(model)):
            own["WEFT_ADAPTERS"] = json.dumps(list(spec.adapters[model_name(model)]))
        service(f"worker-{number}", "worker", address, {**with_metrics(2 + number), **own})
    host = _WILDCARDS.get(spec.host, spec.host)
    address = joined(host, _port_of(listen))
    http_address = joined(host, int(http_port)) if http_port.isdecimal() and int(http_port) else ""
    own = {**with_metrics(0), HTTP_PORT_SETTING: http_port}
    if spec.gateways is not None:
        own[PROCESSES_SETTING] = str(spec.gateways)
    service("gateway", "gateway", listen, own, reached_at=address)
    tools = _tools(scheduler, home)
    return MeshPlan(specs, mesh_id, own_reach, address, listen, http_address, redis, home.folder, tools, ports)


def _ranks(settings: Mapping[str, str]) -> int:
    """Processes of a worker. A value that is no number is left to the worker, which refuses it."""
    values = [{**os.environ, **settings}.get(f"WEFT_{kind}_PARALLEL", "") for kind in ("TENSOR", "PIPELINE")]
    return math.prod(int(value) if value.isdecimal() and int(value) else 1 for value in values)


async def wait_served(address: str, workers: int, reach: Reach = PLAIN) -> list[api.Model]:
    """The models that the gateway offers, once `workers` workers serve them; none where it asks for a key."""
    async with reach.channel(address, "gateway") as channel:
        stub: stubs.InferenceAsyncStub = stubs.InferenceStub(channel)
        while True:
            try:
                reply = await stub.ListModels(api.ListModelsRequest(), timeout=_CHECK_S)
            except grpc.RpcError as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return []
                reply = api.ListModelsResponse()
            if sum(model.workers for model in reply.models if not model.base) >= workers:
                return list(reply.models)
            await asyncio.sleep(0.05)


def serving(address: str, service: str, mesh_id: str = "", reach: Reach = PLAIN) -> Callable[[], Awaitable[bool]]:
    """Asks whether the gRPC health service at `address` reports that `service` is SERVING, for this mesh: a process of
    another one, or of none, never is."""

    async def ask() -> bool:
        async with reach.channel(address, _ROLES[service]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_CHECK_S)
            try:
                reply = await call
                metadata = dict(await call.initial_metadata())
            except grpc.RpcError:
                return False
            own = not mesh_id or metadata.get(mesh_ids.METADATA_KEY) == mesh_id
            return own and bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return ask


def model_name(model: str) -> str:
    """The name under which a model is served: the last part of its folder or of its name on the hub."""
    return Path(model).name


def without_password(url: str) -> str:
    """A Redis URL that may be printed."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


_HEALTH_NAMES: Mapping[Role, str] = {
    "cache": "weft.v1.Cache",
    "scheduler": "weft.v1.Scheduler",
    "worker": "weft.v1.Worker",
    "gateway": "weft.v1.Inference",
}
_ROLES = {name: role for role, name in _HEALTH_NAMES.items()}


def _redis(spec: MeshSpec, home: Home) -> tuple[str, str, list[ProcessSpec]]:
    """The URL of Redis, its description for people, and the process to start, if any. Raises NoRedisError."""
    if spec.redis_url:
        return spec.redis_url, without_password(spec.redis_url), []
    redis = EmbeddedRedis(home.folder / "redis")
    name = "Valkey" if redis.program.name == "bundled" else redis.program.name
    description = f"embedded {name}, data in {_short(redis.folder)}"
    if home.shared_with is not None:
        description += f" (another mesh uses {_short(home.shared_with)})"

    def set_unreadable_data_aside() -> str | None:
        aside = redis.set_aside()
        return f"its data could not be read and is now in {_short(aside)}" if aside else None

    process = ProcessSpec(
        name="redis",
        command=redis.command(),
        ready=redis.answers,
        # Not SIGKILL: Redis writes its data before it ends.
        orphan_signal=signal.SIGTERM,
        repair=set_unreadable_data_aside,
        inherited=(home.lock,),
    )
    return redis.url, description, [process]


def _tools(scheduler: str, home: Home) -> str:
    """How `weft adapters` and `weft bench --profile` reach a mesh whose scheduler or folder is not the default."""
    folder = f"WEFT_HOME={_short(home.folder)} " if home.shared_with is not None else ""
    flag = "" if scheduler == SCHEDULER_ADDRESS else f" --scheduler {scheduler}"
    return f"{folder}weft adapters list{flag}" if folder or flag else ""


def _check_host(host: str) -> None:
    """Raises OpenToOthers for an address beyond loopback that is not protected, unless that is permitted."""
    try:
        allowed = CommonSettings().allow_unprotected
    except ValidationError:  # The processes refuse this setting, or another one, with the reason.
        allowed = False
    protected = all(os.environ.get(name) for name in ("WEFT_TENANTS_FILE", CERT, KEY))
    if not (allowed or protected or rpc.is_loopback(host)):
        raise OpenToOthers(
            f"--host {host} is open to other machines: set WEFT_TENANTS_FILE to a file of tenants (see `weft key`) "
            f"and {CERT} and {KEY} to a certificate; {rpc.UNPROTECTED_HELP}"
        )


def _check_redis_url(url: str) -> None:
    """Raises CannotServe for what is no URL of a Redis, without the URL, which may hold a password."""
    try:
        sound = not url or urlsplit(url).scheme in ("redis", "rediss", "unix")
    except ValueError:
        sound = False
    if not sound:
        raise CannotServe("--redis-url: not a redis://, rediss:// or unix:// URL")


def _addresses(spec: MeshSpec, ports: HeldPorts) -> tuple[list[str], str]:
    """Held addresses of gateway, scheduler, cache and workers: their default ports, or free ones where those are taken;
    and the gateway's port for HTTP.

    Raises CannotServe.
    """
    worker, count = _port_of(WORKER_ADDRESS), spec.workers * len(spec.models)
    defaults = [_port_of(SCHEDULER_ADDRESS), _port_of(CACHE_ADDRESS), *range(worker, worker + count)]
    wanted = spec.port if spec.port is not None else 0 if spec.free_ports else _port_of(GATEWAY_ADDRESS)
    gateway = _public(spec.host, wanted, ports, "--port")
    http_port = _http_port(spec, ports)
    inner = [(None if spec.free_ports else ports.take(HOST, port)) or ports.free(HOST) for port in defaults]
    ports.all_chosen()
    return [joined(spec.host, gateway), *(joined(HOST, port) for port in inner)], http_port


def _public(host: str, wanted: int, ports: HeldPorts, flag: str) -> int:
    """Holds a port that callers use. Raises CannotServe."""
    try:
        port = ports.take(host, wanted)
    except OSError as error:
        raise CannotServe(f"{joined(host, wanted)} cannot be listened at: {error.strerror}") from None
    if port is None:
        raise PortTaken(f"port {wanted} is taken: stop what listens there or choose another with {flag}")
    return port


def _http_port(spec: MeshSpec, ports: HeldPorts) -> str:
    """Holds the gateway's port for HTTP. A value that is no port is left to the gateway, which refuses it.

    Raises CannotServe.
    """
    wanted = {**os.environ, **spec.settings}.get(HTTP_PORT_SETTING, "")
    if spec.http_port is not None:
        wanted = str(spec.http_port)
    if wanted:
        is_port = wanted.isdecimal() and 0 < int(wanted) <= _MOST_PORT
        return str(_public(spec.host, int(wanted), ports, "--http-port")) if is_port else wanted
    default = None if spec.free_ports else ports.take(spec.host, HTTP_PORT)
    return str(default or ports.free(spec.host))


def joined(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _short(path: Path) -> str:
    """The path relative to the current folder if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
