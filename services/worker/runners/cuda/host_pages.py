"""Host memory for blocks that are evicted from a GPU's pool: pinned, and copied both ways beside the steps in flight.

Knows pages as bytes, never what they hold. A block is copied in two hops: a kernel gathers its layers into a buffer on
the device, which takes microseconds, and the copy engine sends the buffer to the host while steps run; and back alike.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.block_copy import gather_blocks, pool_addresses, scatter_blocks

PIECE_BLOCKS = 32
"""Blocks copied at a time: what the buffers on the device hold."""
_ROUNDS = 3


class HostPage:
    """The contents of a block in pinned memory. Its page is free again when this object is garbage."""

    __slots__ = ("_pages", "arrived", "place")

    def __init__(self, pages: "HostPages", place: int) -> None:
        self._pages, self.place = pages, place
        self.arrived: Any = None
        """The event after which the contents are in place."""

    def __len__(self) -> int:
        return self._pages.page_bytes

    def __del__(self) -> None:
        self._pages.free.append(self.place)


class HostPages:
    """Pages of `max_bytes`, and PIECE_BLOCKS more for copies in flight. Called from the engine's thread alone."""

    def __init__(self, pools: Sequence[Tensor], max_bytes: int) -> None:
        """pools: [blocks, ...] of each layer, equal in shape; a block of one layer is a multiple of 8 bytes."""
        self._pool, layers, device = pools[0], len(pools), pools[0].device
        words = pools[0][0].numel() * pools[0].element_size() // 8
        self.page_bytes = layers * words * 8
        count = max_bytes // self.page_bytes + PIECE_BLOCKS
        on_gpu = device.type == "cuda"
        self._pinned = torch.empty(count, layers, words, dtype=torch.int64, pin_memory=on_gpu)
        self.free = list(range(count))
        """Indices of pages that hold nothing."""
        self._addresses = pool_addresses(pools)
        self._leaving, self._coming = torch.empty(2, PIECE_BLOCKS, layers, words, dtype=torch.int64, device=device)
        self._on_gpu = on_gpu
        self._out, self._in = self._stream(), self._stream()
        self._restored = self._sent_up = self._event()

    def keep(self, blocks: list[int]) -> list[HostPage]:
        """Copy these blocks, whose steps are over; fewer if there is no room. What is launched later may overwrite the
        blocks."""
        places = sorted(self.free.pop() for _ in blocks[: len(self.free)])
        pages = [HostPage(self, place) for place in places]
        with self._beside(self._out):
            self._wait(self._restored)  # A block that was just restored may be evicted again.
            self._wait(self._sent_up)  # The page may have just been freed by another block.
            for start in range(0, len(pages), PIECE_BLOCKS):
                piece = pages[start : start + PIECE_BLOCKS]
                buffer = self._leaving[: len(piece)]
                gather_blocks(self._addresses, self._pool, self._sent(blocks[start : start + len(piece)]), buffer)
                gathered = self._event()
                for at, place, count in runs(piece):
                    self._pinned[place : place + count].copy_(buffer[at : at + count], non_blocking=True)
                arrived = self._event()
                for page in piece:
                    page.arrived = arrived
        if pages:
            self._wait(gathered)
        return pages

    def restore(self, blocks: list[int], pages: Sequence[HostPage]) -> None:
        """Fill blocks that no job uses, before what is launched later."""
        order = sorted(range(len(pages)), key=lambda index: pages[index].place)
        for start in range(0, len(pages), PIECE_BLOCKS):
            chosen = order[start : start + PIECE_BLOCKS]
            piece = [pages[index] for index in chosen]
            buffer = self._coming[: len(piece)]
            with self._beside(self._in):
                self._wait(self._restored)  # The buffer's last contents are in the pool.
                for arrived in {id(page.arrived): page.arrived for page in piece}.values():
                    self._wait(arrived)
                for at, place, count in runs(piece):
                    buffer[at : at + count].copy_(self._pinned[place : place + count], non_blocking=True)
                self._sent_up = self._event()
            self._wait(self._sent_up)
            scatter_blocks(self._addresses, self._pool, self._sent([blocks[index] for index in chosen]), buffer)
            self._restored = self._event()

    def measure(self) -> float:
        """Seconds that a block takes to the host and back, measured with the padding block."""
        padding = [0] * PIECE_BLOCKS
        for _ in range(_ROUNDS):  # the first ones compile
            self._finish()
            began = time.perf_counter()
            self.restore(padding, self.keep(padding))
            self._finish()
        return (time.perf_counter() - began) / PIECE_BLOCKS

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._pool.device)

    def _stream(self) -> Any:
        return torch.cuda.Stream(self._pool.device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _beside(self, stream: Any) -> Iterator[None]:
        """Run the block in a stream of copies instead of the steps' stream."""
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    def _event(self) -> Any:
        return torch.cuda.current_stream(self._pool.device).record_event() if self._on_gpu else None

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._pool.device).wait_event(event)

    def _sent(self, blocks: list[int]) -> Tensor:
        # The driver copies so few bytes at once: pinning them would cost more.
        return torch.tensor(blocks, dtype=torch.int64).to(self._pool.device, non_blocking=True)


class Placed(Protocol):
    """A page of a buffer."""

    @property
    def place(self) -> int:
        """Its index in the buffer."""


def runs(pages: Sequence[Placed]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring pages, given in their order: index of the first one, its page number, how many."""
    first = 0
    for after in range(1, len(pages) + 1):
        if after == len(pages) or pages[after].place != pages[first].place + after - first:
            yield first, pages[first].place, after - first
            first = after
