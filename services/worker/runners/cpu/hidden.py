"""The hidden states of computed tokens, by block: what draft heads read. Knows places of tokens, no sequences.

They lie beside the keys and values of the same blocks, so a prefix that is found in this worker's cache has them, too.
Blocks that come from elsewhere have none: zeros, with which guesses are worse and nothing is wrong.

T tokens, W width, L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HiddenPool:
    """`HiddenStates` in host memory."""

    def __init__(self, layers: Sequence[int], width: int, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """layers: the residual streams before these are kept. Room for blocks 1 to `blocks`."""
        self.width = width * len(layers)
        self._columns = {layer: slice(index * width, (index + 1) * width) for index, layer in enumerate(layers)}
        self._states = torch.zeros(blocks + 1, block_size, self.width, dtype=dtype)
        self._by_place = self._states.view(-1, self.width)

    def take(self, layer: int, x: Tensor, slot_mapping: Tensor) -> None:
        """Keep the stream before this layer, [T, W], if it is one of the pool's."""
        columns = self._columns.get(layer)
        if columns is not None:
            # Numbers that are not finite would stay in the heads' keys and values beyond the row that fails by them.
            self._by_place[slot_mapping, columns] = x.nan_to_num(0.0, 0.0, 0.0)

    def read(self, places: Tensor) -> Tensor:
        """What is kept of the tokens at these places, int64 [T] -> [T, L * W]."""
        return self._by_place[places]

    def clear(self, blocks: list[int]) -> None:
        """Nothing is known of the tokens of these blocks."""
        self._states[blocks] = 0
