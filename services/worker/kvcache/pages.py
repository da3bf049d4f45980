"""The memory of a pool: a tensor of pages for each layer. Knows shapes and formats, never whose blocks they are."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels import kv_pages
from services.worker.models.config import ModelConfig

_ALIGNED = 64  # bytes, as torch aligns its tensors


def make_layers(
    config: ModelConfig, blocks: int, block_size: int, stored: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Pages of zeros for blocks 0 to `blocks`, a tensor for each layer, as `kernels.kv_pages` defines them. Host memory
    is taken from the system as blocks are first used: to touch all of it takes a second for each GiB."""
    if torch.device(device).type == "cpu":
        rows = kv_pages.page_rows(block_size, config.head_dim, stored)
        shape = (blocks + 1, rows, 2, config.kv_heads, config.head_dim)
        return [_untouched_zeros(shape, stored) for _ in range(config.layers)]
    numbers = (blocks + 1, block_size, config.kv_heads, config.head_dim)
    return [kv_pages.make_pool(*numbers, stored, device) for _ in range(config.layers)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    room = np.zeros(count + _ALIGNED, np.uint8)
    first = -room.ctypes.data % _ALIGNED
    return torch.from_numpy(room[first : first + count]).view(dtype).view(shape)
