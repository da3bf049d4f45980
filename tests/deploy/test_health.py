"""What probes hear of a service: whether its process lives, and whether it is ready, are two questions."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from services import health, rpc

NAME = "weft.v1.Inference"


@pytest.fixture
async def waiting() -> AsyncIterator[rpc.Server]:
    """A service that listens and is not ready, as a gateway is before there is a model."""
    server = await rpc.serve("127.0.0.1:0", [rpc.Service(NAME, lambda servicer, server: None, None)])
    yield server
    await server.stop(0)


async def word(server: rpc.Server, name: str = "") -> str:
    return await asyncio.to_thread(health.check, f"127.0.0.1:{server.port}", name)


async def test_waiting_is_no_reason_to_be_restarted(waiting: rpc.Server) -> None:
    assert await word(waiting, NAME) == "NOT_SERVING"
    assert await word(waiting) == "SERVING"
    await waiting.ready()
    assert await word(waiting, NAME) == "SERVING"
    await waiting.ready(False)
    assert await word(waiting, NAME) == "NOT_SERVING"
    assert await word(waiting) == "SERVING"


async def test_a_name_that_nobody_has_is_never_healthy(waiting: rpc.Server) -> None:
    assert await word(waiting, "weft.v1.Gateway") == "NOT_FOUND"


async def test_the_command_tells_by_its_exit_code(waiting: rpc.Server) -> None:
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
