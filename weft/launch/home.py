"""The folder in which one mesh keeps its data and its logs. No two running meshes have the same one.

A lock on the folder belongs to the process that starts the mesh and to its Redis, which inherits it: so the data is
free only when Redis, too, has ended.
"""

import asyncio
import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

_ORPHAN_S = 10.0
"""How long the Redis of a mesh that was killed may take to write its data and end."""
_LOOK_S = 0.05


def default_home() -> Path:
    """WEFT_HOME, else .weft in the current folder."""
    return Path(os.environ.get("WEFT_HOME") or ".weft").absolute()


@dataclass(frozen=True, slots=True)
class Home:
    """A folder that belongs to this mesh alone until the lock is released."""

    folder: Path
    lock: int
    """A file descriptor. Processes that inherit it keep the folder locked as long as they live."""
    shared_with: Path | None = None
    """The folder that was asked for, where another mesh runs; None if this is the one."""


@contextlib.asynccontextmanager
async def locked_home(wanted: Path) -> AsyncIterator[Home]:
    """The wanted folder, or its first subfolder mesh-2, mesh-3, ... that no other mesh uses, until the block ends.

    The numbers make a second mesh find its data again when it is next started beside a first one.
    """
    folder, numbers = wanted, itertools.count(2)
    while (lock := await _lock(_opened(folder))) is None:
        folder = wanted / f"mesh-{next(numbers)}"
    try:
        yield Home(folder, lock, None if folder == wanted else wanted)
    finally:
        os.close(lock)


def _opened(folder: Path) -> int:
    """The lock file of a folder, which is created if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


async def _lock(lock: int) -> int | None:
    """Locks the file; None if another mesh has it. Waits for what is left of a mesh whose launcher has died."""
    deadline = time.monotonic() + _ORPHAN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline or _is_alive(os.pread(lock, 32, 0)):
                os.close(lock)
                return None
        await asyncio.sleep(_LOOK_S)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _is_alive(pid: bytes) -> bool:
    """Whether the process that wrote its id into a lock runs; it does as long as nothing is written."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        return True
    return True
