"""Draft heads beside the served model, on the CPU: a draft model that reads the served model's hidden states."""

import numpy as np
import torch
from torch import Tensor

from services.worker.models.draft_heads import DraftHeads
from services.worker.runners.cpu.drafts.draft_model import CpuDraftModel
from services.worker.runners.cpu.hidden import HiddenPool
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.steps import Ints


class CpuHeads(CpuDraftModel):
    """Guesses for rows of a `CpuRunner`, which keeps hidden states for them."""

    def __init__(self, heads: DraftHeads, ops: ReferenceOps, blocks: int, block_size: int, stored: torch.dtype) -> None:
        super().__init__(heads, ops, blocks, block_size, stored)
        config = heads.heads_config
        self.hidden = HiddenPool(
            config.hidden_layers, config.layer.hidden_size, blocks, block_size, heads.embedding.dtype
        )
        self._heads, self._block_size = heads, block_size

    def _first_features(self, contexts: Ints, lengths: Ints, tables: Ints) -> Tensor:
        """The fused hidden states of the token before each pending one; zeros before a sequence's first token."""
        ends, size = np.cumsum(lengths), self._block_size
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        before = np.arange(len(row_of)) + (contexts - ends)[row_of] - 1
        places = tables[row_of, np.maximum(before, 0) // size] * size + before % size
        states = self.hidden.read(torch.from_numpy(places))
        states[torch.from_numpy(before < 0)] = 0
        return self._heads.fused(states)

    def _next_features(self, x: Tensor) -> Tensor:
        return x
