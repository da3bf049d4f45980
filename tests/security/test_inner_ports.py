"""The inner ports permit what the table does, and nothing else: no strangers, no other roles, no other meshes."""

import re
from pathlib import Path

import grpc
import pytest

from services.health import ROLE_OF
from services.security.authorization import MATRIX
from services.security.identity import of_secret
from services.security.roles import ROLES
from tests.mesh.harness import Mesh, Process
from tests.security import callers
from tests.security.conftest import SECRET

pytestmark = pytest.mark.asyncio(loop_scope="session")
CODES = grpc.StatusCode
REFUSED_OR_BROKEN = (CODES.PERMISSION_DENIED, CODES.UNAUTHENTICATED, CODES.UNKNOWN, CODES.INTERNAL)
BESIDE = {"weft.v1.Worker": ["vllm.grpc.engine.VllmEngine"]}
"""Further services on the port of a service."""
STRANGERS = ("nobody", "stranger", "self-signed")


def inner(mesh: Mesh) -> list[Process]:
    """The processes with inner ports."""
    assert mesh.cache is not None
    return [mesh.scheduler, mesh.workers[0], mesh.cache]


async def test_the_table_has_every_method_of_every_inner_port() -> None:
    assert callers.all_inner_methods() == MATRIX.keys()
    assert set().union(*MATRIX.values()) == set(ROLES)


async def test_security_md_repeats_the_table() -> None:
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    rows = re.findall(r"^\| `(/[\w./]+)` \| (.+?) \|", text, re.M)
    written = {method: ROLES if roles == "every role" else tuple(roles.split(", ")) for method, roles in rows}
    assert {method: set(roles) for method, roles in written.items() if method in MATRIX} == MATRIX


@pytest.mark.parametrize("place", range(3), ids=["scheduler", "worker", "cache"])
async def test_every_method_is_open_to_the_roles_of_the_table_alone(mesh: Mesh, place: int) -> None:
    process = inner(mesh)[place]
    listed = callers.methods(process.health, *BESIDE.get(process.health, ()))
    for name, identity in callers.callers(SECRET.encode()):
        ended = await callers.walk(process.address, ROLE_OF[process.health], identity, listed)
        for method, code in ended.items():
            if name in STRANGERS:
                assert code is callers.REFUSED_BY_TLS, (name, method)
            elif name in MATRIX[method]:
                assert code not in REFUSED_OR_BROKEN, (name, method)
            else:
                assert code is CODES.PERMISSION_DENIED, (name, method)


@pytest.mark.parametrize("place", range(3), ids=["scheduler", "worker", "cache"])
async def test_a_caller_that_names_another_mesh_is_refused_whatever_its_role(mesh: Mesh, place: int) -> None:
    process = inner(mesh)[place]
    listed = [method for method in callers.methods(process.health) if "weft" in method]
    for role in ROLES:
        identity = of_secret(role, SECRET.encode())
        ended = await callers.walk(process.address, ROLE_OF[process.health], identity, listed, "another")
        assert set(ended.values()) == {CODES.FAILED_PRECONDITION}


async def test_a_server_of_another_role_or_mesh_is_not_called(mesh: Mesh) -> None:
    """A process that took over the port of another one receives nothing."""
    method = "/grpc.health.v1.Health/Check"
    gateway = of_secret("gateway", SECRET.encode())
    for role in ROLES:
        ended = await callers.walk(mesh.scheduler.address, role, gateway, [method])
        assert ended == {method: CODES.OK if role == "scheduler" else CODES.UNAVAILABLE}
    ended = await callers.walk(mesh.scheduler.address, "scheduler", callers.stranger("gateway"), [method])
    assert ended == {method: CODES.UNAVAILABLE}
