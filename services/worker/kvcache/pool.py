"""The memory of blocks: keys and values of all layers, and their contents as bytes for the tiers below. Block 0 is
nobody's. Knows blocks by number, never whose they are.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels import kv_pages
from services.worker.kvcache.tiers import Contents
from services.worker.models.config import ModelConfig


class KvPool(Protocol):
    """A device's pool."""

    layers: list[Tensor]
    """Pages of each layer, as `kernels.kv_pages` defines them."""

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


def make_layers(
    config: ModelConfig, blocks: int, block_size: int, stored: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Pages of zeros for blocks 0 to `blocks`, a tensor for each layer."""
    shape = (blocks + 1, block_size, config.kv_heads, config.head_dim)
    return [kv_pages.make_pool(*shape, stored, device) for _ in range(config.layers)]
