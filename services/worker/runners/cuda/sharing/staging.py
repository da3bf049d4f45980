"""Pages on this GPU for blocks that were copied out of another worker's pool, until they are written to the own one.

Knows pages as bytes, never what they hold. One thread fills pages; the engine's thread writes them to the pool.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.block_copy import gather_blocks, pool_addresses, scatter_blocks
from services.worker.runners.cuda.host_pages import runs

_MOST_BYTES = 512 << 20
_MOST_PAGES = 256
_ALL_LAYERS = slice(None)


class StagedPage:
    """The contents of a block. Its page is free again when this object is garbage."""

    __slots__ = ("_pages", "place")

    def __init__(self, pages: "StagedPages", place: int) -> None:
        self._pages, self.place = pages, place

    def __len__(self) -> int:
        return self._pages.page_bytes

    def __del__(self) -> None:
        self._pages.free.append(self.place)


def warm_up(pools: Sequence[Tensor]) -> None:
    """Copy the padding block there and back, so that the kernels are compiled before blocks wait for them."""
    addresses, padding = pool_addresses(pools), torch.zeros(1, dtype=torch.int64, device=pools[0].device)
    page = torch.empty((1, len(pools), *pools[0].shape[1:]), dtype=pools[0].dtype, device=pools[0].device)
    gather_blocks(addresses, pools[0], padding, page)
    scatter_blocks(addresses, pools[0], padding, page)


class StagedPages:
    """Room for some hundred blocks, used in turn: a page is filled again long after it was read."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: [blocks, ...] of each layer, equal in shape; a block of one layer is a multiple of 8 bytes."""
        self._pool, layers, self.device = pools[0], len(pools), pools[0].device
        words = pools[0][0].numel() * pools[0].element_size() // 8
        self.page_bytes = layers * words * 8
        self.count = max(1, min(_MOST_PAGES, _MOST_BYTES // self.page_bytes))
        self._pages = torch.empty(self.count, layers, words, dtype=torch.int64, device=self.device)
        self.free = deque(range(self.count))
        """Places of pages that hold nothing, the one that was freed first on the left."""
        self._read: dict[int, Any] = {}
        """The event after which the contents of a freed page are not needed any more."""
        self._addresses = pool_addresses(pools)
        self._side: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def take(self, count: int, spare: int = 0) -> list[StagedPage]:
        """Pages for so many blocks; fewer if only `spare` would be left. Called from one thread."""
        places = sorted(self.free.popleft() for _ in range(max(0, min(count, len(self.free) - spare))))
        return [StagedPage(self, place) for place in places]

    def fill(
        self, pages: Sequence[StagedPage], addresses: Tensor, blocks: Sequence[int], layers: slice = _ALL_LAYERS
    ) -> None:
        """Copy these layers of blocks of the pool whose layers have these addresses (int64 [all layers]), each to its
        page, and wait for it. Called from one thread."""
        with self._beside():
            read = [event for page in pages if (event := self._read.pop(page.place, None))]
            for event in {id(event): event for event in read}.values():
                event.wait()
            chosen = addresses[layers].clone()  # as in `_sent`
            for at, place, count in runs(pages):
                wanted = self._sent(blocks[at : at + count])
                gather_blocks(chosen, self._pool, wanted, self._pages[place : place + count, layers])
            self._finish()

    def write(self, blocks: Sequence[int], pages: Sequence[StagedPage]) -> None:
        """Write pages to blocks of the pool that no job uses, before what is launched later. Called from the engine's
        thread."""
        order = sorted(range(len(pages)), key=lambda index: pages[index].place)
        for at, place, count in runs([pages[index] for index in order]):
            wanted = self._sent([blocks[index] for index in order[at : at + count]])
            scatter_blocks(self._addresses, self._pool, wanted, self._pages[place : place + count])
        if self._side is not None:
            event = torch.cuda.current_stream(self.device).record_event()
            self._read.update((page.place, event) for page in pages)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run the block in a stream of its own."""
        with contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side):
            yield

    def _sent(self, blocks: Sequence[int]) -> Tensor:
        # A tensor of its own for each launch: a part of one may lie where the kernel would be compiled anew.
        return torch.tensor(list(blocks), dtype=torch.int64).to(self.device, non_blocking=True)

    def _finish(self) -> None:
        if self._side is not None:
            self._side.synchronize()
