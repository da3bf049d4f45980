"""INT8 without calibration: rounds each linear to nearest. With dynamic inputs it is the fastest format on CPUs."""

from dataclasses import dataclass

from torch import nn

from compress.base.network import LayerStats, linear, linears_of
from compress.quantize import layout
from compress.quantize.recipe import Recipe, Rounded
from compress.quantize.rounding import round_int8


@dataclass(frozen=True, slots=True)
class Int8(Recipe):
    """8-bit weights, with a scale per output or one for the whole weight."""

    dynamic: bool = False
    """Inputs are rounded too, with a scale per token (W8A8)."""
    per_tensor: bool = False
    calibrated = False

    @property
    def scheme(self) -> layout.Scheme:
        """int-quantized."""
        return layout.int8(per_tensor=self.per_tensor, dynamic=self.dynamic)

    def round(self, layer: nn.Module, _: LayerStats | None, /) -> Rounded:
        """Round each linear to nearest."""
        how = {"per_tensor": self.per_tensor, "dynamic": self.dynamic}
        return Rounded({name: round_int8(linear(layer, name).weight.detach(), **how) for name in linears_of(layer)})
