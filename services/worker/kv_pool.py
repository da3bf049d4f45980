"""The memory of blocks: keys and values of all layers, and their contents as bytes for the tiers below. Block 0 is
nobody's. Knows blocks by number, never whose they are.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels import kv
from services.worker.config import ModelConfig
from services.worker.tiers import Contents


class KvPool(Protocol):
    """A device's pool."""

    layers: list[Tensor]
    """Pages of each layer, as `kernels.kv` defines them."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""

    @property
    def host_block_s(self) -> float:
        """Seconds that a block takes to host memory and back, as measured; 0: it is there already."""

    def scrub(self, blocks: list[int], /) -> None:
        """Zero blocks that may hold NaN, after all launched steps: a masked key still meets its value as 0 * NaN."""

    def read(self, blocks: list[int], /) -> list[bytes]:
        """The contents of blocks that are computed: keys and values, layer after layer."""

    def keep(self, blocks: list[int], /) -> Sequence[Contents]:
        """The same, to be kept in host memory; fewer if there is no room. Steps launched later may overwrite them."""

    def write(self, blocks: list[int], payloads: Sequence[Contents], /) -> None:
        """Fill blocks that no job uses with what `read` or `keep` gave, after all launched steps."""


class CpuPool:
    """A pool in host memory."""

    host_block_s = 0.0

    def __init__(self, config: ModelConfig, blocks: int, block_size: int, stored: torch.dtype) -> None:
        """Room for blocks 1 to `blocks`, each of `block_size` tokens."""
        self.layers = make_layers(config, blocks, block_size, stored, "cpu")
        # The same memory as bytes: [blocks + 1, bytes of one block in one layer].
        self._contents = [kv.bytes_of(layer).numpy() for layer in self.layers]

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
        layers = np.stack([contents[blocks] for contents in self._contents], axis=1)
        return [block.tobytes() for block in layers]

    def keep(self, blocks: list[int]) -> list[bytes]:
        """The same: the pool is in host memory already."""
        return self.read(blocks)

    def write(self, blocks: list[int], payloads: Sequence[Any]) -> None:
        """Fill blocks that no job uses with what `read` gave, `block_bytes` for each."""
        assert all(len(payload) == self.block_bytes for payload in payloads), "contents of another layout"
        received = np.frombuffer(b"".join(payloads), np.uint8).reshape(len(blocks), len(self.layers), -1)
        for layer, contents in enumerate(self._contents):
            contents[blocks] = received[:, layer]


def make_layers(
    config: ModelConfig, blocks: int, block_size: int, stored: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Pages of zeros for blocks 0 to `blocks`, a tensor for each layer."""
    shape = (blocks + 1, block_size, config.kv_heads, config.head_dim)
    return [kv.make_pool(*shape, stored, device) for _ in range(config.layers)]
