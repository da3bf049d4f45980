"""The adapters that a worker serves, by name: loaded, dropped, found for a job. Knows no tensor.

Lives on the event loop. A job holds its adapter itself: one that is dropped serves its running jobs to their end.
"""

import asyncio
import re
from collections.abc import Callable, Iterable

import structlog
from grpc import StatusCode

from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid
from services.worker.errors import CheckpointError
from services.worker.job import Adapter
from services.worker.options import ADAPTER_NAME

log = structlog.get_logger("worker.adapters")

NOT_LOADED = WeftError(
    StatusCode.UNAVAILABLE, "ADAPTER_NOT_LOADED", "this worker does not serve the adapter", retryable=True
)


class Adapters:
    """All adapters of this worker."""

    def __init__(
        self,
        read: Callable[[str, str], Adapter],
        most: int,
        resident: Callable[[], Iterable[bytes]] = tuple,
        given: Iterable[Adapter] = (),
    ) -> None:
        """read(name, folder) takes tenths of a second and raises CheckpointError. resident() returns the
        fingerprints of those in device memory. given: those of the start."""
        self._read, self._most, self._resident = read, most, resident
        self._by_name = {adapter.name: adapter for adapter in given}
        self._loading = asyncio.Lock()
        self.changed: Callable[[], object] = lambda: None
        """Called when the list has changed."""

    def find(self, fingerprint: bytes) -> Adapter | None:
        """The adapter of a job; None for a job without one. Raises WeftError."""
        if not fingerprint:
            return None
        for adapter in self._by_name.values():
            if adapter.fingerprint == fingerprint:
                return adapter
        raise NOT_LOADED

    async def load(self, name: str, folder: str) -> mesh.AdapterState:
        """Read an adapter and serve it. Jobs go on meanwhile. Raises WeftError."""
        if not re.fullmatch(ADAPTER_NAME, name):
            raise invalid("name", "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
        if not folder:
            raise invalid("folder", "is empty")
        async with self._loading:
            try:
                adapter = await asyncio.to_thread(self._read, name, folder)
            except CheckpointError as error:
                raise invalid("folder", str(error), "INVALID_ADAPTER") from None
            known = self._by_name.get(name)
            if known is not None and known.fingerprint != adapter.fingerprint:
                message = f"another adapter has the name {name}: drop it first"
                raise WeftError(StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS", message, field="name")
            if known is None and len(self._by_name) >= self._most:
                message = f"the worker serves {self._most} adapters, which is its limit (MAX_CPU_LORAS)"
                raise WeftError(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ADAPTERS", message)
            if known is None:
                self._by_name[name] = adapter
                log.info("adapter loaded", adapter=name, rank=adapter.rank, bytes=adapter.nbytes)
                self.changed()
        return self._state(self._by_name[name])

    def drop(self, name: str) -> None:
        """Serve an adapter no longer. Raises WeftError."""
        if self._by_name.pop(name, None) is None:
            raise WeftError(StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", f"there is no adapter {name}", field="name")
        log.info("adapter dropped", adapter=name)
        self.changed()

    def listing(self) -> mesh.AdapterList:
        """All adapters, sorted by name."""
        return mesh.AdapterList(adapters=[self._state(each) for _, each in sorted(self._by_name.items())])

    def _state(self, adapter: Adapter) -> mesh.AdapterState:
        return mesh.AdapterState(
            name=adapter.name,
            fingerprint=adapter.fingerprint,
            rank=adapter.rank,
            bytes=adapter.nbytes,
            resident=adapter.fingerprint in self._resident(),
        )
