"""Where the hidden states of a decoder go that draft heads read. Knows the interface, not who keeps them."""

from typing import Protocol

from torch import Tensor


class HiddenStates(Protocol):
    """Takes the residual stream of a step's tokens before each layer. A runner that keeps hidden states has one."""

    def take(self, layer: int, x: Tensor, slot_mapping: Tensor, /) -> None:
        """x [T, hidden]: the stream before this layer, which changes after the call; slot_mapping [T]: where the
        tokens' keys and values are."""
