"""Health checks for probes: the empty name reports that the process runs, the service's name that it is ready."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services import health, rpc
from services.security.certificates import Authority, KeyPair
from services.security.door_tls import CERT, DoorCertificate

NAME = "weft.v1.Inference"


@pytest.fixture
async def waiting() -> AsyncIterator[rpc.Server]:
    """A service that listens and is not ready, like a gateway without a model."""
    server = await rpc.serve("127.0.0.1:0", [rpc.Service(NAME, lambda servicer, server: None, None)])
    yield server
    await server.stop(0)


async def health_of(server: rpc.Server, name: str = "") -> str:
    return await asyncio.to_thread(health.check, f"127.0.0.1:{server.port}", name)


async def test_a_service_that_is_not_ready_is_alive(waiting: rpc.Server) -> None:
    assert await health_of(waiting, NAME) == "NOT_SERVING"
    assert await health_of(waiting) == "SERVING"
    await waiting.ready()
    assert await health_of(waiting, NAME) == "SERVING"
    await waiting.ready(False)
    assert await health_of(waiting, NAME) == "NOT_SERVING"
    assert await health_of(waiting) == "SERVING"


async def test_an_unknown_name_is_never_healthy(waiting: rpc.Server) -> None:
    assert await health_of(waiting, "weft.v1.Gateway") == "NOT_FOUND"


async def test_a_gateway_is_healthy_whatever_becomes_of_its_certificate_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a renewed one, and serves on with the old one if the new files cannot be used."""
    certificate, key = tmp_path / "door.crt", tmp_path / "door.key"

    def write(pair: KeyPair) -> None:
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)

    authority = Authority.random()
    first, renewed, further = (authority.issue(["weft.example"]) for _ in range(3))
    write(first)
    monkeypatch.setenv(CERT, str(certificate))
    door = rpc.PublicDoor(DoorCertificate(str(certificate), str(key)).grpc(), authenticated=True)
    server = await rpc.serve("127.0.0.1:0", [rpc.Service(NAME, lambda servicer, server: None, None)], public=door)
    await server.ready()
    assert await health_of(server, NAME) == "SERVING"
    write(renewed)
    assert await health_of(server, NAME) == "SERVING"
    certificate.write_bytes(further.certificate)  # Without its key.
    assert await health_of(server, NAME) == "SERVING"
    certificate.write_bytes(b"nothing")
    assert await health_of(server, NAME) == "SERVING"
    await server.stop(0)
    assert await health_of(server, NAME) == "UNAVAILABLE"


async def test_the_exit_code_of_the_health_command_is_the_answer(waiting: rpc.Server) -> None:
    async def exit_code(*arguments: str) -> int:
        command = (sys.executable, "-m", "services.health", *arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()
        assert process.returncode is not None
        return process.returncode

    address = f"127.0.0.1:{waiting.port}"
    assert await exit_code(address) == 0
    assert await exit_code(address, NAME) == 1
    await waiting.ready()
    assert await exit_code(address, NAME) == 0
    assert await exit_code() == 2
    await waiting.stop(0)
    assert await exit_code(address, NAME) == 1
