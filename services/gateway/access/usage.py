"""Where a tenant's use of its limits is counted: in this process, or in memory that all processes of a gateway share.

Knows numbers, never limits. Levels and times of a shared tenant are changed under a lock of the kernel on the tenant's
bytes, which a process that dies releases. A process that cannot get it within 5 milliseconds, in which it yields its
core to the holder, goes on without: the holder was stopped, and at most the one change that is made meanwhile is lost.
Running answers are counted by member, each in a cell that it alone writes; the supervisor clears those of a member that
died.
"""

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from typing import Protocol

MOST_TENANTS = 8192
"""Tenants that a table has room for; each process counts further ones on its own."""
MOST_MEMBERS = 72
"""Members that may live at the same time: 64, and successors of those that are replaced."""
_WORD = 8
_MARGIN = 8  # Words of a row before the running answers: key, two levels with their times, three unused.
_ROW = _MARGIN + MOST_MEMBERS
_KEY, _REQUESTS, _TOKENS = 0, 1, 3
_MOST_PROBES = 64
_LONGEST_WAIT_S = 0.005


class Level(Protocol):
    """The level of a bucket at a time; `at` is 0 before the first."""

    level: float
    at: float


class Usage(Protocol):
    """What one tenant uses."""

    requests: Level
    tokens: Level

    @property
    def running(self) -> int:
        """Concurrent answers, of all processes."""

    @property
    def own_running(self) -> int:
        """Concurrent answers of this process."""

    def add_running(self, change: int) -> None:
        """Changes the concurrent answers of this process."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no other process changes the levels."""


class LocalLevel:
    """A level of this process."""

    __slots__ = ("at", "level")

    def __init__(self) -> None:
        self.level = self.at = 0.0


class LocalUsage:
    """The usage of a tenant at a gateway of one process."""

    def __init__(self) -> None:
        self.requests, self.tokens = LocalLevel(), LocalLevel()
        self.running = 0

    @property
    def own_running(self) -> int:
        """Concurrent answers of this process: all of them."""
        return self.running

    def add_running(self, change: int) -> None:
        """Changes the concurrent answers."""
        self.running += change

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to lock."""
        return contextlib.nullcontext()


class SharedLevel:
    """A level in shared memory."""

    def __init__(self, words: "memoryview[float]", place: int) -> None:
        self._words, self._place = words, place

    @property
    def level(self) -> float:
        """The level."""
        return float(self._words[self._place])

    @level.setter
    def level(self, value: float) -> None:
        self._words[self._place] = value

    @property
    def at(self) -> float:
        """Its time."""
        return float(self._words[self._place + 1])

    @at.setter
    def at(self, value: float) -> None:
        self._words[self._place + 1] = value


class SharedUsage:
    """The usage of a tenant at a gateway of several processes."""

    def __init__(self, table: "UsageTable", row: int, member: int) -> None:
        self._table, self._row = table, row
        self._own = row * _ROW + _MARGIN + member
        self.requests: Level = SharedLevel(table.numbers, row * _ROW + _REQUESTS)
        self.tokens: Level = SharedLevel(table.numbers, row * _ROW + _TOKENS)

    @property
    def running(self) -> int:
        """Concurrent answers of all members."""
        first = self._row * _ROW + _MARGIN
        return sum(self._table.counts[first : first + MOST_MEMBERS])

    @property
    def own_running(self) -> int:
        """Concurrent answers of this member."""
        return int(self._table.counts[self._own])

    def add_running(self, change: int) -> None:
        """Changes the concurrent answers of this member."""
        self._table.counts[self._own] += change

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no other process changes this tenant's numbers, as far as none is stopped."""
        return self._table.locked(self._row)


class UsageTable:
    """The usage of all tenants, in anonymous memory with a descriptor that members inherit. Linux only."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, MOST_TENANTS * _ROW * _WORD))
        self.numbers, self.counts, self._keys = memory.cast("d"), memory.cast("q"), memory.cast("Q")

    @classmethod
    def create(cls) -> "UsageTable":
        """An empty table."""
        descriptor = os.memfd_create("weft-usage", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, MOST_TENANTS * _ROW * _WORD)  # Pages exist once they are written.
        return cls(descriptor)

    def usage(self, tenant_hash: str, member: int) -> SharedUsage | None:
        """The usage of a tenant, whose hash has at least 16 hexadecimal digits; None if the table is full."""
        key = int(tenant_hash[:16], 16) or 1
        with self.locked(MOST_TENANTS):
            for probe in range(_MOST_PROBES):
                row = (key + probe) % MOST_TENANTS
                if self._keys[row * _ROW + _KEY] in (0, key):
                    self._keys[row * _ROW + _KEY] = key
                    return SharedUsage(self, row, member)
        return None

    def forget(self, member: int) -> None:
        """Clears the running answers of a member that has ended."""
        for row in range(MOST_TENANTS):
            if self._keys[row * _ROW + _KEY]:
                self.counts[row * _ROW + _MARGIN + member] = 0

    @contextlib.contextmanager
    def locked(self, row: int) -> Iterator[None]:
        """Locks a row against other processes."""
        held, latest = self._try_lock(row), time.monotonic() + _LONGEST_WAIT_S
        while not held and time.monotonic() < latest:
            os.sched_yield()
            held = self._try_lock(row)
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, row)

    def _try_lock(self, row: int) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
        except OSError:
            return False
        return True
