"""The hidden states of computed tokens on a GPU, by block: what draft heads read. Knows places of tokens, no sequences.

They lie beside the keys and values of the same blocks, as those of `runners.cpu.hidden` do.

T tokens, W width, L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.drafts import hidden_states
from kernels.step_io import StepInputs


class GpuHidden:
    """`HiddenStates` that are allocated with the KV pool. Until then there is block 0, padding."""

    def __init__(
        self, layers: Sequence[int], width: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """layers: the residual streams before these are kept."""
        self._columns = {layer: index * width for index, layer in enumerate(layers)}
        self._block_size, self._numbers, self._dtype, self._device = block_size, width * len(layers), dtype, device
        self.allocate(0)

    def allocate(self, blocks: int) -> None:
        """Allocate blocks 1 to `blocks`, all zeros. To be called before a graph is captured."""
        shape = blocks + 1, self._block_size, self._numbers
        self.states = torch.zeros(shape, dtype=self._dtype, device=self._device)
        """[blocks + 1, block size, L * W]."""

    def take(self, layer: int, x: Tensor, slot_mapping: Tensor) -> None:
        """Keep the stream before this layer, [T, W], if it is one of the pool's. No number is kept that is not finite:
        it would stay in the heads' keys and values beyond the row that fails by it."""
        column = self._columns.get(layer)
        if column is not None:
            hidden_states.keep(x, slot_mapping, self.states.view(-1, self._numbers), column)

    def before(self, inputs: StepInputs) -> Tensor:
        """What is kept of the token before each of a step's tokens, [T, L * W]; zeros before a sequence's first."""
        return hidden_states.before(inputs, self.states.view(-1, self._numbers), self._block_size)

    def clear(self, blocks: Tensor) -> None:
        """Nothing is known of the tokens of these blocks, int64 [n]. All launched steps come before."""
        self.states.index_fill_(0, blocks, 0)
