"""A runner's decoder opened up for tools: one sequence as the only row of a step. Knows the model, no jobs.

Legend: T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.kvcache.pool import KvPool
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.runners.base import StepResult
from services.worker.runners.step import Words


@dataclass(frozen=True, slots=True)
class DecoderInspection:
    """One sequence in a decoder. Its keys and values go to blocks 1, 2, ... of the pools."""

    model: Decoder
    step: StepTensors
    """What the layers share of a step with the sequence's T tokens, none of which is sampled from."""
    pools: list[Tensor]
    """Pages of each layer."""

    @torch.inference_mode()
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits [T, V] at each token."""
        x, _ = self.model.forward(self.step, self.pools)
        logits: npt.NDArray[np.float32] = self.model.logits(x).float().cpu().numpy()
        return logits


class PagedPool(KvPool, Protocol):
    """A pool of torch's tensors."""

    layers: list[Tensor]
    """Pages of each layer, as `kernels.kv_pages` defines them."""


class DecoderRunner(Protocol):
    """What the runners of a torch decoder have in common."""

    model: Decoder

    @property
    def kv(self) -> PagedPool:
        """Keys and values of all layers."""

    def run(self, words: Words, /) -> StepResult:
        """Launch a step and collect it."""

    def inspect(self, token_ids: Sequence[int], /) -> DecoderInspection:
        """Open up the model for one sequence."""


def first_blocks(tokens: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks 1, 2, ... that hold `tokens` tokens, and the slot mapping of these, both int64 on the CPU."""
    blocks, positions = torch.arange(1, -(-tokens // block_size) + 1), torch.arange(tokens)
    return blocks, blocks[positions // block_size] * block_size + positions % block_size
