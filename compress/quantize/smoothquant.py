"""SmoothQuant: inputs with outliers are divided and their weights multiplied by factors, so that both fit into INT8
(arXiv:2211.10438)."""

from dataclasses import dataclass

import torch
from torch import nn

from compress.base.linears import LINEARS
from compress.base.network import LayerStats, linear
from compress.quantize import layout
from compress.quantize.folding import fold_pairs
from compress.quantize.recipe import Recipe, Rounded
from compress.quantize.rounding import round_int8


@dataclass(frozen=True, slots=True)
class SmoothQuant(Recipe):
    """8-bit weights with a scale per output, 8-bit inputs with a scale per token (W8A8)."""

    strength: float = 0.5
    """Share of the outliers' range that moves to the weights: 0 none, 1 all."""
    calibrated = True

    @property
    def scheme(self) -> layout.Scheme:
        """int-quantized, with inputs."""
        return layout.int8(per_tensor=False, dynamic=True)

    def round(self, layer: nn.Module, seen: LayerStats | None, /) -> Rounded:
        """Fold factors at every pair of the layer, then round."""
        assert seen is not None
        for pair in fold_pairs(layer):
            inputs = pair.gather(seen.inputs[pair.readers[0]].largest).clamp_min(1e-5)
            sizes = torch.stack([linear(layer, name).weight.detach().abs().amax(0) for name in pair.readers])
            weights = pair.gather(sizes.amax(0)).clamp_min(1e-5)
            pair.move(layer, inputs**self.strength / weights ** (1 - self.strength))
        return Rounded({name: round_int8(linear(layer, name).weight.detach(), dynamic=True) for name in LINEARS})
