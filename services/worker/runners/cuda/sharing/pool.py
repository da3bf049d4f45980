"""The pool of a GPU for other processes of this host, and theirs for this one: memory is mapped by the CUDA driver.

Knows blocks by number and memory by address, not who shares it. A block is copied in two hops: one kernel gathers its
layers out of the other pool into a buffer on this GPU, over NVLink, beside the steps in flight; the engine's thread
scatters them from there to the blocks that it has chosen. What is wrong or late never gets into the pool.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.peers import memory as peer_memory
from kernels.peers.memory import PeerMemoryError
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.runners.cuda.sharing.staging import StagedPage, StagedPages, warm_up

if TYPE_CHECKING:
    from services.worker.runners.cuda.kv_pool import GpuPool

_KIND = "cuda-ipc/1"


class SharedGpuPool:
    """A `SharedMemory`: the pool of this process's GPU."""

    def __init__(self, pool: "GpuPool") -> None:
        """The pool is allocated already, and stays where it is."""
        self._pool = pool
        if pool.device.type == "cuda":
            warm_up(pool.layers)

    def describe(self) -> bytes:
        """Handles of the allocations that the layers are in, and where in them. Raises CannotShare."""
        handles: dict[int, str] = {}
        layers = []
        try:
            with peer_memory.context_of(self._pool.layers[0].data_ptr()):
                for layer in self._pool.layers:
                    base = peer_memory.allocation_of(layer.data_ptr())
                    if base not in handles:
                        handles[base] = peer_memory.export(base).hex()
                    layers.append([list(handles).index(base), layer.data_ptr() - base])
        except PeerMemoryError as error:
            hint = "PYTORCH_CUDA_ALLOC_CONF must not have expandable_segments"
            raise CannotShare(f"{error} ({hint})") from error
        described = {
            "kind": _KIND, "gpu": _gpu(self._pool.device), "handles": list(handles.values()), "layers": layers,
            "blocks": len(self._pool.layers[0]), "page": list(self._pool.layers[0][0].shape),
        }  # fmt: skip
        return json.dumps(described).encode()

    def map(self, description: bytes) -> "MappedGpuPool":
        """Map another process's pool of the same layout. Raises CannotShare."""
        try:
            described = json.loads(description)
            if described["kind"] != _KIND or described["page"] != list(self._pool.layers[0][0].shape):
                raise CannotShare("the other worker's memory has another form")
            handles = [bytes.fromhex(handle) for handle in described["handles"]]
            layers = [(int(place), int(offset)) for place, offset in described["layers"]]
            blocks, gpu = int(described["blocks"]), str(described["gpu"])
        except (ValueError, KeyError, TypeError) as error:
            raise CannotShare("the description of the other worker's memory cannot be read") from error
        if len(layers) != len(self._pool.layers) or any(not 0 <= place < len(handles) for place, _ in layers):
            raise CannotShare("the other worker's memory has another form")
        opened: list[int] = []
        try:
            with peer_memory.context_of(self._pool.layers[0].data_ptr()):
                for handle in handles:
                    opened.append(peer_memory.open_exported(handle))
        except PeerMemoryError as error:
            self._close(opened)
            seen = "is" if gpu in _visible() else "is not"
            hint = f"the other worker's GPU {seen} visible to this process (CUDA_VISIBLE_DEVICES)"
            raise CannotShare(f"{error}: {hint}") from error
        addresses = [opened[place] + offset for place, offset in layers]
        try:
            return MappedGpuPool(self._pool.staged_pages(), addresses, blocks, lambda: self._close(opened))
        except torch.OutOfMemoryError as error:
            self._close(opened)
            raise CannotShare("there is no device memory for copies") from error

    def _close(self, opened: Sequence[int]) -> None:
        with peer_memory.context_of(self._pool.layers[0].data_ptr()):
            for address in opened:
                peer_memory.close_exported(address)


class MappedGpuPool:
    """A `MappedPool`: the pool of another process's GPU."""

    def __init__(self, staged: StagedPages, addresses: Sequence[int], blocks: int, unmap: Callable[[], None]) -> None:
        """addresses: of the layers; blocks: of the pool, padding included."""
        self._staged, self._blocks, self._unmap = staged, blocks, unmap
        self._addresses: Tensor | None = torch.tensor(addresses, dtype=torch.int64, device=staged.device)

    def copy(
        self, places: Sequence[int], into: Sequence[Any] = (), begin: int = 0, end: int | None = None
    ) -> Sequence[StagedPage]:
        """As `MappedPool.copy`, to pages of this GPU. Half of these are left to blocks that are whole."""
        if self._addresses is None:
            raise CannotShare("the other worker's memory is not mapped any more")
        if not all(0 <= place < self._blocks for place in places):
            raise CannotShare("the other worker has named blocks that it does not have")
        pages = into or self._staged.take(len(places), spare=0 if end is None else self._staged.count // 2)
        self._staged.fill(pages, self._addresses, places[: len(pages)], slice(begin, end))
        return pages

    def close(self) -> None:
        """Unmap it."""
        if self._addresses is not None:
            self._addresses = None
            self._unmap()


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "unknown"))


def _visible() -> list[str]:
    return [_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
