"""Calls every method of a port with the credentials of many callers, and reports what each call ended with."""

import asyncio
import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import cache_pb2, mesh_pb2, vllm_engine_pb2
from services import rpc
from services.security import mesh_id
from services.security.certificates import Authority
from services.security.identity import NOBODY, Credentials, Identity, of_secret
from services.security.roles import ROLES, Role, role_name

INNER = (mesh_pb2, cache_pb2, vllm_engine_pb2)
PUBLIC = tuple(
    importlib.import_module(f"protos.{path.stem}_pb2")
    for path in sorted(Path(__file__).parents[2].glob("protos/*.proto"))
    if path.stem not in ("mesh", "cache", "vllm_engine", "smg_common")
)
"""The generated modules of all contracts for clients."""
SHARED = (health_pb2, reflection_pb2)
ANSWER_S = 2.0
"""A call that does not end by then was let in: a stream that waits."""
REFUSED_BY_TLS = grpc.StatusCode.UNAVAILABLE


def methods(*services: str) -> list[str]:
    """Every method of these services, health and reflection included, as /package.Service/Method."""
    found = [each for file in (*INNER, *PUBLIC, *SHARED) for each in file.DESCRIPTOR.services_by_name.values()]
    named = {*services, *(name for file in SHARED for name in _services(file))}
    wanted = [each for each in found if each.full_name in named]
    return [f"/{service.full_name}/{method.name}" for service in wanted for method in service.methods]


def all_inner_methods() -> set[str]:
    """Every method of every service that an inner port may serve."""
    return set(methods(*(name for file in INNER for name in _services(file))))


def all_public_methods() -> list[str]:
    """Every method of every service that a public port serves."""
    return methods(*(name for file in PUBLIC for name in _services(file)))


def _services(file: ModuleType) -> list[str]:
    return [service.full_name for service in file.DESCRIPTOR.services_by_name.values()]


def stranger(role: Role) -> Identity:
    """An identity of another mesh."""
    return of_secret(role, b"another mesh's secret, which is long enough")


def self_signed(role: Role, mesh: Identity) -> Identity:
    """One that accepts the servers of a mesh, and presents a certificate of an authority of its own for the role."""
    assert mesh.credentials is not None
    pair = Authority.random().issue([role_name(role)])
    return Identity(role, b"", Credentials(mesh.credentials.authority, pair.certificate, pair.key))


def callers(secret: bytes) -> Iterator[tuple[str, Identity]]:
    """All kinds of callers by name: "nobody", "stranger" and "self-signed" are not of the mesh."""
    yield "nobody", NOBODY
    yield "stranger", stranger("gateway")
    yield "self-signed", self_signed("gateway", of_secret("gateway", secret))
    for role in ROLES:
        yield role, of_secret(role, secret)


WRITTEN_AFTER_END = "Internal error from Core"
"""What gRPC's client reports if it writes in the moment in which the server ends the call."""


async def ended_with(channel: aio.Channel, method: str, metadata: Mapping[str, str] | None = None) -> grpc.StatusCode:
    """The status of a call that sends one empty message; OK for one that is still open after a while."""
    while (code := await _ended_with(channel, method, metadata or {})) is None:
        pass
    return code


async def _ended_with(channel: aio.Channel, method: str, metadata: Mapping[str, str]) -> grpc.StatusCode | None:
    call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(method)(metadata=tuple(metadata.items()))
    try:
        async with asyncio.timeout(ANSWER_S):
            await call.write(b"")
            await call.done_writing()
            async for _ in call:
                break
            else:
                return await call.code()
    except aio.AioRpcError as error:
        return None if error.details() == WRITTEN_AFTER_END else error.code()
    except (asyncio.InvalidStateError, asyncio.CancelledError):
        return await call.code()
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(Exception):
            call.cancel()
    return grpc.StatusCode.OK


async def walk(
    address: str, server: Role, identity: Identity, listed: list[str], own_mesh: str = ""
) -> dict[str, grpc.StatusCode]:
    """How a call of each method ends, for one caller. `own_mesh`: the mesh id that its calls name."""
    named = dict(mesh_id.metadata(own_mesh))
    async with rpc.link_channel(address, server, identity) as channel:
        return {method: await ended_with(channel, method, named) for method in listed}
