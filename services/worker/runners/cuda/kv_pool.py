"""The memory of blocks on a GPU, and the copies of their contents to the host and back, beside the steps in flight.

Knows blocks by number, no sequences. It works on a CPU too, for tests of all that is not the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import kv_pages
from services.worker.kvcache.pages import make_layers
from services.worker.kvcache.pool import LayersComputed
from services.worker.kvcache.tiers import Contents
from services.worker.models.config import ModelConfig
from services.worker.runners.cuda.hidden import GpuHidden
from services.worker.runners.cuda.host_pages import HostPage, HostPages
from services.worker.runners.cuda.sharing.staging import StagedPage, StagedPages


class GpuPool:
    """A `LayeredPool` that is allocated once it is known how much memory is left. Before, it has block 0, padding."""

    def __init__(self, config: ModelConfig, block_size: int, stored: torch.dtype, device: torch.device) -> None:
        """For blocks of `block_size` tokens, whose numbers are stored as `stored`."""
        self.block_size, self.stored, self.device = block_size, stored, device
        self._config = config
        self.allocate(0)
        self.hidden: GpuHidden | None = None
        """The hidden states of the blocks' tokens; None: they are not needed."""
        self.host_block_s = 0.0
        """Measured seconds that a block takes to host memory and back."""
        self._written: Any = None
        """The event after which the last blocks that were written are in place."""
        self.call: LayersComputed | None = None
        """Is called as layers of a step are computed."""
        self._host_pages: HostPages | None = None
        self._staged_pages: StagedPages | None = None
        self.beside = on_gpu = device.type == "cuda"
        """Whether blocks can be read while layers of a step are computed."""
        # Its kernels are small, and the steps' large ones leave no room for those that may wait.
        self._side: Any = torch.cuda.Stream(device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def settled(self) -> bool:
        """Whether all that was written is in place: it is behind the steps that were launched before."""
        return self._written is None or bool(self._written.query())

    def allocate(self, blocks: int) -> None:
        """Allocate blocks 1 to `blocks`, all zeros. To be called before a graph is captured or host pages are made:
        they hold the layers' addresses."""
        self.layers: list[Tensor] = []  # free the old ones first
        self.layers = make_layers(self._config, blocks, self.block_size, self.stored, self.device)
        self.block_bytes = sum(layer[0].numel() * layer.element_size() for layer in self.layers)
        """Bytes of one block's keys and values, all layers."""

    def use_host(self, max_bytes: int) -> None:
        """Allocate host memory for the blocks that `keep` copies."""
        self._host_pages = HostPages(self.layers, max_bytes)
        self.host_block_s = self._host_pages.measure()

    def staged_pages(self) -> StagedPages:
        """Pages for blocks that come from other workers' pools, allocated at the first call."""
        if self._staged_pages is None:
            self._staged_pages = StagedPages(self.layers)
        return self._staged_pages

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN, after all steps in the stream."""
        where = self._sent(blocks)
        for layer in self.layers:
            kv_pages.bytes_of(layer).index_fill_(0, where, 0)

    def read(self, blocks: list[int]) -> list[bytes]:
        """The contents of computed blocks: keys and values, layer after layer. Steps in flight continue."""
        return self.read_layers(blocks, 0, len(self.layers))

    def read_layers(self, blocks: list[int], begin: int, end: int) -> list[bytes]:
        """Of the contents of blocks, those of layers `begin` to `end`, which are computed. Steps in flight continue."""
        if self._side is None:
            contents = self._gather(blocks, begin, end)
        else:
            with torch.cuda.stream(self._side):
                if self._written is not None:
                    self._side.wait_event(self._written)
                gathered = self._gather(blocks, begin, end)
                contents = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
                contents.copy_(gathered, non_blocking=True)
                self._side.synchronize()
        lines = contents.view(len(blocks), -1).numpy()
        return [line.tobytes() for line in lines]

    def on_layers(self, call: LayersComputed) -> None:
        """Call this as layers of a step are computed, while the engine's thread waits for it; never on a CPU."""
        if self._side is not None:
            self.call = call

    def keep(self, blocks: list[int]) -> Sequence[Contents]:
        """Copies of computed blocks in host memory; fewer if there is no room. Steps in flight continue, and steps
        launched later may overwrite the blocks."""
        assert self._host_pages is not None, "there is no host memory for blocks"
        return self._host_pages.keep(blocks)

    def write(self, blocks: list[int], payloads: Sequence[Any]) -> None:
        """Fill blocks that no job uses with what `read` or `keep` returned, or what came out of another worker's pool,
        after all launched steps."""
        self._write(blocks, payloads)
        if self._side is not None:
            self._written = torch.cuda.current_stream(self.device).record_event()

    def _write(self, blocks: list[int], payloads: Sequence[Any]) -> None:
        assert all(len(payload) == self.block_bytes for payload in payloads), "contents of another layout"
        if self.hidden is not None:
            self.hidden.clear(self._sent(blocks))
        if payloads and isinstance(payloads[0], HostPage):
            assert self._host_pages is not None, "there is no host memory that these pages could come from"
            self._host_pages.restore(blocks, payloads)
            return
        if payloads and isinstance(payloads[0], StagedPage):
            self.staged_pages().write(blocks, payloads)
            return
        received = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
        where = self._sent(blocks)
        contents = received.to(self.device).view(len(blocks), len(self.layers), -1)
        for index, layer in enumerate(self.layers):
            kv_pages.bytes_of(layer).index_copy_(0, where, contents[:, index].contiguous())

    def _gather(self, blocks: list[int], begin: int, end: int) -> Tensor:
        where = self._sent(blocks)
        return torch.stack([kv_pages.bytes_of(layer).index_select(0, where) for layer in self.layers[begin:end]], 1)

    def _sent(self, blocks: list[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)
