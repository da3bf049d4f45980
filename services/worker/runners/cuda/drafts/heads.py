"""Draft heads beside the served model, on a GPU: a draft model that reads the served model's hidden states.

Right guesses are computed once more, with the hidden states that are known by then: a row's first pass has as many
tokens as its last step has drawn. A later pass reads what the heads put out in the pass before it, on the device.
"""

import torch
from torch import Tensor

from kernels.sampling.slot_settings import SlotSettings
from kernels.step_io import StepInputs
from services.worker.models.draft_heads import DraftHeads
from services.worker.runners.cuda.drafts.draft_model import GpuDraftModel
from services.worker.runners.cuda.graphs import GUESSES
from services.worker.runners.cuda.hidden import GpuHidden
from services.worker.runners.cuda.ops import TritonOps


class GpuHeads(GpuDraftModel):
    """Guesses for rows of a `GpuRunner`, whose model gives `hidden` its residual streams."""

    lengths = tuple(count + 1 for count in GUESSES)
    redoes_guesses = True

    def __init__(
        self,
        heads: DraftHeads,
        ops: TritonOps,
        block_size: int,
        slots: int,
        step_tokens: int,
        stored: torch.dtype,
        tables: Tensor,
        settings: SlotSettings,
        guesses: Tensor,
    ) -> None:
        """As `GpuDraftModel`."""
        super().__init__(heads, ops, block_size, slots, step_tokens, stored, tables, settings, guesses)
        config, dtype, device = heads.heads_config, heads.embedding.dtype, heads.embedding.device
        self.hidden = GpuHidden(config.hidden_layers, config.layer.hidden_size, block_size, dtype, device)
        self._heads = heads
        self._output = torch.zeros(slots, config.layer.hidden_size, dtype=dtype, device=device)
        """[slots, width]: the residual stream from which each row of the last pass drew."""

    def allocate(self, blocks: int) -> None:
        """Allocate keys and values, and the hidden states, of blocks 1 to `blocks`."""
        super().allocate(blocks)
        self.hidden.allocate(blocks)

    def _first_features(self, inputs: StepInputs) -> Tensor:
        return self._heads.fused(self.hidden.before(inputs))

    def _next_features(self, inputs: StepInputs) -> Tensor:
        return self._output[: len(inputs.token_ids)]

    def _drew_from(self, x: Tensor) -> None:
        self._output[: len(x)].copy_(x)
