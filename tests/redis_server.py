"""A real Redis-compatible server that a test may start, kill, freeze and restart; it keeps its data.

Use it as `with RedisServer(folder) as redis:`, or by the fixture `redis_server`
(`from tests.redis_server import redis_server`). Nothing here needs an event loop.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from services.cache.embedded import EmbeddedRedis
from tests.ports import free_port

START_S = 10.0


class RedisServer:
    """The embedded server at a TCP port and a Unix socket. Restarts keep port and data."""

    def __init__(self, folder: Path, max_bytes: int = 64 << 20, *options: str) -> None:
        """`options` are appended to its command line, such as "--requirepass", "secret"."""
        self.embedded = EmbeddedRedis(folder, max_bytes)
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the TCP port; `embedded.url` is that of the Unix socket."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The running process."""
        assert self._process is not None, "the server is not running"
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()

    def start(self) -> None:
        """Starts the server on the data in its folder and waits until it answers."""
        assert self._process is None, "the server is running"
        command = [*self.embedded.command(), "--bind", "127.0.0.1", "--port", str(self.port), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, f"the server ended with {self._process.poll()}"
            assert time.monotonic() < end, f"the server does not answer after {START_S} s"
            time.sleep(0.005)

    def stop(self) -> int:
        """Ends the server with SIGTERM, as a supervisor does. Returns the exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """Ends the server with SIGKILL. Returns the exit status, -9."""
        return self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Suspends the server with SIGSTOP; returns when the kernel reports that it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()

    def thaw(self) -> None:
        """Resumes the server after `freeze`."""
        self.process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait()
        self._process = None
        return status

    def _answers(self) -> bool:
        # A server that still loads its data answers LOADING; one with a password answers NOAUTH and is ready.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as peer:
            peer.sendall(b"PING\r\n")
            return peer.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        return False


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server with empty data."""
    with RedisServer(tmp_path / "redis") as server:
        yield server
