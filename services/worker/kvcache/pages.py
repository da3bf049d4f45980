"""The memory of a pool: a tensor of pages for each layer. Knows shapes and formats, never whose blocks they are."""

import torch
from torch import Tensor

from kernels import kv_pages
from services.worker.models.config import ModelConfig


def make_layers(
    config: ModelConfig, blocks: int, block_size: int, stored: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Pages of zeros for blocks 0 to `blocks`, a tensor for each layer, as `kernels.kv_pages` defines them."""
    shape = (blocks + 1, block_size, config.kv_heads, config.head_dim)
    return [kv_pages.make_pool(*shape, stored, device) for _ in range(config.layers)]
