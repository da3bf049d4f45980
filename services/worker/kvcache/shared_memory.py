"""Device memory that workers of one host share: the interface. Knows blocks by number, no device and no network."""

from collections.abc import Sequence
from typing import Protocol

from services.worker.kvcache.tiers import Contents


class CannotShare(Exception):
    """Memory cannot be described, mapped or copied. The message says why, in one line without addresses."""


class MappedPool(Protocol):
    """The pool of another worker, mapped into this process. One thread uses it."""

    def copy(
        self, places: Sequence[int], into: Sequence[Contents] = (), begin: int = 0, end: int | None = None, /
    ) -> Sequence[Contents]:
        """Copy layers `begin` to `end` (None: all from `begin` on) of these blocks into this worker's memory and wait
        for it. The other worker must not change them meanwhile. into: what an earlier call has returned, which had
        copied the layers before; without it, only the first blocks are copied if there is no room for all now. -> the
        contents. Raises CannotShare."""

    def close(self) -> None:
        """Unmap it. Not to be used afterwards."""


class SharedMemory(Protocol):
    """The memory of a worker's pool."""

    def describe(self) -> bytes:
        """What another process of this host needs to map it: a secret. Raises CannotShare."""

    def map(self, description: bytes, /) -> MappedPool:
        """Map the pool that another process has described, whose blocks have the same layout. Raises CannotShare."""
