"""INT8 without calibration: round each linear to the nearest. With dynamic inputs it is what CPUs multiply fastest."""

from dataclasses import dataclass

from torch import nn

from compress import layout
from compress.network import LINEARS, Seen, linear
from compress.recipe import Recipe, Rounded
from compress.rounding import round_int8


@dataclass(frozen=True, slots=True)
class Int8(Recipe):
    """Weights of 8 bits, a scale for each output or one for the whole weight."""

    dynamic: bool = False
    """Inputs are rounded too, each token by its own largest number (W8A8)."""
    per_tensor: bool = False
    calibrated = False

    @property
    def scheme(self) -> layout.Scheme:
        """int-quantized."""
        return layout.int8(per_tensor=self.per_tensor, dynamic=self.dynamic)

    def round(self, layer: nn.Module, _: Seen | None, /) -> Rounded:
        """Each linear to the nearest."""
        how = {"per_tensor": self.per_tensor, "dynamic": self.dynamic}
        return Rounded({name: round_int8(linear(layer, name).weight.detach(), **how) for name in LINEARS})
