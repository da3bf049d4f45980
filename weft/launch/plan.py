"""The whole mesh on one machine: which processes it takes, at which addresses, with which settings and which Redis.

Knows how the services are started and asked whether they are ready, never what they do.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services import rpc
from services.cache.embedded import EmbeddedRedis
from services.settings import CACHE_ADDRESS, GATEWAY_ADDRESS, SCHEDULER_ADDRESS, WORKER_ADDRESS
from weft.launch.supervisor import Spec

HOST = "127.0.0.1"
_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """What the mesh shall be."""

    models: Sequence[str]
    """Folders of checkpoints, or their names on the hub."""
    home: Path
    """Where data and logs are kept."""
    workers: int = 1
    """Of each model."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names, each with the name (the last part of the folder) of the model that it stands for."""
    redis_url: str = ""
    """Empty: the embedded Redis."""
    port: int | None = None
    """The gateway's; None takes its default."""
    free_ports: bool = False
    """Take free ports for everything, so that no other mesh on this machine is in the way."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further environment of all processes."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Processes in the order of their start, where the gateway listens, which Redis is used (fit to be printed)."""

    specs: Sequence[Spec]
    address: str
    redis: str


class PortTaken(Exception):
    """The gateway's port is in use."""


async def plan(wanted: MeshSpec) -> MeshPlan:
    """The mesh that is wanted. Raises PortTaken, and NoRedisError if there is no Redis to embed."""
    gateway, scheduler, cache, *workers = _addresses(wanted)
    redis_url, redis, specs = await _redis(wanted)
    environment = {
        **wanted.settings,
        "WEFT_SCHEDULER_ADDRESS": scheduler,
        "WEFT_CACHE_ADDRESS": cache,
        "PYTHONUNBUFFERED": "1",
    }
    first_port = {**os.environ, **wanted.settings}.get("WEFT_METRICS_PORT") or "0"

    def counted(place: int) -> dict[str, str]:
        """Where the process at this place answers Prometheus, if it shall: each has a port of its own. What is no
        number the processes refuse themselves."""
        counts = first_port.isdecimal() and int(first_port) > 0
        return {**environment, "WEFT_METRICS_PORT": str(int(first_port) + place) if counts else first_port}

    specs.append(_service("cache", "cache", cache, {**counted(2), "WEFT_REDIS_URL": redis_url}))
    specs.append(_service("scheduler", "scheduler", scheduler, counted(1)))
    threads = str(max(1, (os.cpu_count() or 1) // len(workers)))
    for number, address in enumerate(workers, 1):
        model = wanted.models[(number - 1) // wanted.workers]
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "MODEL_NAME": model}
        aliases = [alias for alias, name in wanted.aliases.items() if name == model_name(model)]
        if aliases:
            own["WEFT_ALIASES"] = json.dumps(aliases)
        specs.append(_service(f"worker-{number}", "worker", address, {**counted(2 + number), **own}))
    specs.append(_service("gateway", "gateway", gateway, counted(0)))
    return MeshPlan(specs, gateway, redis)


async def wait_served(address: str, workers: int) -> list[api.Model]:
    """The models that the gateway offers, once `workers` workers serve them; none where it asks for a key."""
    async with rpc.link_channel(address) as channel:
        stub: stubs.InferenceAsyncStub = stubs.InferenceStub(channel)
        while True:
            try:
                reply = await stub.ListModels(api.ListModelsRequest(), timeout=_CHECK_S)
            except grpc.RpcError as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return []
                reply = api.ListModelsResponse()
            if sum(model.workers for model in reply.models) >= workers:
                return list(reply.models)
            await asyncio.sleep(0.05)


def serving(address: str, service: str) -> Callable[[], Awaitable[bool]]:
    """Asks whether the gRPC health service at `address` says that `service` is SERVING."""

    async def ask() -> bool:
        async with rpc.link_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_CHECK_S)
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return ask


def model_name(model: str) -> str:
    """The name under which a model is served: the last part of its folder or of its name on the hub."""
    return Path(model).name


def without_password(url: str) -> str:
    """A Redis URL that may be printed."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


_HEALTH_NAMES = {
    "cache": "weft.v1.Cache",
    "scheduler": "weft.v1.Scheduler",
    "worker": "weft.v1.Worker",
    "gateway": "weft.v1.Inference",
}


def _service(name: str, module: str, address: str, environment: Mapping[str, str]) -> Spec:
    return Spec(
        name=name,
        command=[sys.executable, "-m", f"services.{module}"],
        ready=serving(address, _HEALTH_NAMES[module]),
        environment={**environment, "WEFT_LISTEN": address},
    )


async def _redis(wanted: MeshSpec) -> tuple[str, str, list[Spec]]:
    """The URL, how to speak of it, and the process it takes, if any."""
    if wanted.redis_url:
        return wanted.redis_url, without_password(wanted.redis_url), []
    redis = EmbeddedRedis(wanted.home / "redis")
    name = "Valkey" if redis.program.name == "bundled" else redis.program.name
    spoken = f"embedded {name}, data in {_short(redis.folder)}"
    if await redis.answers():
        return redis.url, f"{spoken} (running already)", []

    def set_unreadable_data_aside() -> str | None:
        aside = redis.set_aside()
        return f"its data could not be read and is now in {_short(aside)}" if aside else None

    spec = Spec(
        name="redis",
        command=redis.command(),
        ready=redis.answers,
        # Not SIGKILL: it shall write what it has.
        orphan_signal=signal.SIGTERM,
        mend=set_unreadable_data_aside,
    )
    return redis.url, spoken, [spec]


def _addresses(wanted: MeshSpec) -> list[str]:
    """Addresses of gateway, scheduler, cache and workers: their default ports, or free ones where those are taken."""
    worker, count = _port_of(WORKER_ADDRESS), wanted.workers * len(wanted.models)
    defaults = [_port_of(SCHEDULER_ADDRESS), _port_of(CACHE_ADDRESS), *range(worker, worker + count)]
    gateway = wanted.port if wanted.port is not None else 0 if wanted.free_ports else _port_of(GATEWAY_ADDRESS)
    held = [_hold(gateway)]
    try:
        if held[0] is None:
            raise PortTaken(f"port {gateway} is taken: stop what listens there or choose another with --port")
        held += [(None if wanted.free_ports else _hold(port)) or _hold(0) for port in defaults]
        # All are held until all are chosen, so that no two are the same.
        return [f"{HOST}:{holder.getsockname()[1]}" for holder in held if holder is not None]
    finally:
        for holder in held:
            if holder is not None:
                holder.close()


def _hold(port: int) -> socket.socket | None:
    """A socket bound to the port (0: a free one), or None if it is taken."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((HOST, port))
    except OSError:
        holder.close()
        return None
    return holder


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _short(path: Path) -> str:
    """The path from here, if it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
