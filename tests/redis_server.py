"""A real Redis-compatible server for tests: started, killed, frozen and started again at will, its data kept.

Fixture `redis_server`: import it where it is wanted (`from tests.redis_server import redis_server`).
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from services.cache.embedded import EmbeddedRedis


class RedisServer:
    """The embedded server on a TCP port of its own as well, which it keeps over restarts."""

    def __init__(self, folder: Path, max_bytes: int = 64 << 20, *options: str) -> None:
        self.embedded = EmbeddedRedis(folder, max_bytes)
        self.port = free_port()
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its TCP address; `embedded.url` is the Unix socket."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process that runs now."""
        assert self._process is not None, "the server is not running"
        return self._process

    async def start(self) -> None:
        """Starts it on the data that its folder has and waits until it answers."""
        assert self._process is None, "the server is running"
        command = [*self.embedded.command(), "--bind", "127.0.0.1", "--port", str(self.port), *self._options]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await self.embedded.wait_ready()

    async def stop(self) -> int:
        """Ends it as a supervisor would, with SIGTERM. Returns the exit status."""
        return await self._end(signal.SIGTERM)

    async def kill(self) -> int:
        """Ends it with SIGKILL. Returns the exit status, -9."""
        return await self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stops it from answering, with SIGSTOP; returns when the kernel says that it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        while self._state() != "T":
            os.sched_yield()

    def thaw(self) -> None:
        """Undoes `freeze`."""
        self.process.send_signal(signal.SIGCONT)

    async def close(self) -> None:
        """Ends it if it runs."""
        if self._process is not None:
            await self.kill()

    async def _end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = await self.process.wait()
        self._process = None
        return status

    def _state(self) -> str:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest_asyncio.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """A running server with empty data."""
    server = RedisServer(tmp_path / "redis")
    await server.start()
    yield server
    await server.close()
