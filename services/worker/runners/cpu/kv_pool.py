"""The KV pool in host memory: keys and values of all layers by block. Knows blocks by number, no sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernels import kv_pages
from services.worker.kvcache.pages import make_layers
from services.worker.kvcache.pool import LayersComputed
from services.worker.models.config import ModelConfig
from services.worker.runners.cpu.hidden import HiddenPool


class CpuPool:
    """A `KvPool` in host memory."""

    host_block_s = 0.0
    """Blocks are in host memory already."""
    beside, settled = False, True
    """The engine's thread computes the layers itself."""

    def __init__(self, config: ModelConfig, blocks: int, block_size: int, stored: torch.dtype) -> None:
        """Room for blocks 1 to `blocks`, each of `block_size` tokens."""
        self.layers = make_layers(config, blocks, block_size, stored, "cpu")
        # The same memory as bytes: [blocks + 1, bytes of one block in one layer].
        self._contents = [kv_pages.bytes_of(layer).numpy() for layer in self.layers]
        self._call: LayersComputed | None = None
        self.hidden: HiddenPool | None = None
        """The hidden states of the blocks' tokens; None: they are not needed."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""
        return sum(contents.shape[1] for contents in self._contents)

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN."""
        for contents in self._contents:
            contents[blocks] = 0

    def read(self, blocks: list[int]) -> list[bytes]:
        """The contents of blocks: keys and values, layer after layer, in the pool's own order and number format."""
        return self.read_layers(blocks, 0, len(self.layers))

    def read_layers(self, blocks: list[int], begin: int, end: int) -> list[bytes]:
        """Of the contents of blocks, those of layers `begin` to `end`, which are computed."""
        layers = np.stack([contents[blocks] for contents in self._contents[begin:end]], axis=1)
        return [block.tobytes() for block in layers]

    def on_layers(self, call: LayersComputed) -> None:
        """Call this between the layers of steps."""
        self._call = call

    def computed(self, layers: int) -> None:
        """So many layers of the step are computed."""
        if self._call is not None:
            self._call(layers, len(self.layers))

    def keep(self, blocks: list[int]) -> list[bytes]:
        """The same as `read`: the pool is in host memory already."""
        return self.read(blocks)

    def write(self, blocks: list[int], payloads: Sequence[Any]) -> None:
        """Fill blocks that no job uses with what `read` returned, `block_bytes` for each."""
        assert all(len(payload) == self.block_bytes for payload in payloads), "contents of another layout"
        received = np.frombuffer(b"".join(payloads), np.uint8).reshape(len(blocks), len(self.layers), -1)
        for layer, contents in enumerate(self._contents):
            contents[blocks] = received[:, layer]
        if self.hidden is not None:
            self.hidden.clear(blocks)
