"""SmoothQuant: outlying inputs are divided, their weights multiplied, until both fit into INT8 (arXiv:2211.10438)."""

from dataclasses import dataclass

import torch
from torch import nn

from compress import layout
from compress.folding import seams
from compress.network import LINEARS, Seen, linear
from compress.recipe import Recipe, Rounded
from compress.rounding import round_int8


@dataclass(frozen=True, slots=True)
class SmoothQuant(Recipe):
    """Weights of 8 bits with a scale for each output, inputs of 8 bits with a scale for each token (W8A8)."""

    strength: float = 0.5
    """How much of the difficulty moves to the weights: 0 none, 1 all."""
    calibrated = True

    @property
    def scheme(self) -> layout.Scheme:
        """int-quantized, with inputs."""
        return layout.int8(per_tensor=False, dynamic=True)

    def round(self, layer: nn.Module, seen: Seen | None, /) -> Rounded:
        """Smooth at every seam of the layer, then round."""
        assert seen is not None
        for seam in seams(layer):
            inputs = seam.gather(seen.inputs[seam.readers[0]].largest).clamp_min(1e-5)
            sizes = torch.stack([linear(layer, name).weight.detach().abs().amax(0) for name in seam.readers])
            weights = seam.gather(sizes.amax(0)).clamp_min(1e-5)
            seam.move(layer, inputs**self.strength / weights ** (1 - self.strength))
        return Rounded({name: round_int8(linear(layer, name).weight.detach(), dynamic=True) for name in LINEARS})
