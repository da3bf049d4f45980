"""AWQ, activation-aware weight quantization to 4 bits (Lin et al., arXiv:2306.00978).

Inputs that are often large make errors of their weights costly. So their weights are multiplied by a factor before they
are rounded, and what makes those inputs is divided by it. Then columns are rounded one after another, each making up
for those before it (`compress.gptq`), or, as in the paper, all to the nearest step after each group's range was cut
where that costs least. Searches weigh an error by the inputs' second moments: it is the mean squared error of the
linear's output.

Legend: N outputs, K inputs, B groups of a row, G inputs of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress import layout
from compress.folding import FoldPair, scaled, seams
from compress.gptq import round_together
from compress.network import LINEARS, Moments, Seen, linear
from compress.recipe import Recipe, Rounded
from compress.rounding import cheapest_steps, grouped, int4_weight, steps_of

_EXPONENTS = 12
_UNCUT = ("self_attn.q_proj", "self_attn.k_proj")
"""Their errors pass through a softmax: the paper leaves their ranges whole."""


@dataclass(frozen=True, slots=True)
class Awq(Recipe):
    """Weights of 4 bits in groups of inputs."""

    group: int = 64
    symmetric: bool = False
    compensate: bool = True
    """Columns make up for one another's errors; else ranges are cut, and rounding is to the nearest."""
    calibrated = True

    @property
    def scheme(self) -> layout.Scheme:
        """pack-quantized."""
        return layout.int4(self.group, symmetric=self.symmetric)

    def round(self, layer: nn.Module, seen: Seen | None, /) -> Rounded:
        """Move factors at every seam of the layer, then round."""
        assert seen is not None
        inputs = dict(seen.inputs)
        for seam in seams(layer):
            factor = self._factor(layer, seam, inputs[seam.readers[0]])
            moved = seam.move(layer, factor)
            for name in seam.readers:
                inputs[name] = scaled(inputs[name], moved)
        if self.compensate:
            return Rounded(round_together(layer, inputs, self.group, self.symmetric, act_order=False))
        weights = {}
        for name in LINEARS:
            weight = grouped(linear(layer, name).weight.detach(), self.group)
            worth_BG = inputs[name].gram.diagonal().view(-1, self.group)
            uncut = name in _UNCUT
            steps = steps_of(weight, self.symmetric) if uncut else cheapest_steps(weight, self.symmetric, worth_BG)
            weights[name] = int4_weight(steps.nearest(weight), steps, self.symmetric)
        return Rounded(weights)

    def _factor(self, layer: nn.Module, seam: FoldPair, inputs: Moments) -> Tensor:
        """The factor of each channel that makes the readers' outputs err least."""
        weights = [linear(layer, name).weight.detach() for name in seam.readers]
        return min(_candidates(seam, weights, inputs), key=lambda factor: self._error(seam, weights, inputs, factor))

    def _error(self, seam: FoldPair, weights: list[Tensor], inputs: Moments, factor_C: Tensor) -> float:
        factor_K, error = seam.spread(factor_C), 0.0
        for weight in weights:
            scaled_up = grouped(weight * factor_K, self.group)
            off = steps_of(scaled_up, self.symmetric).rounded(scaled_up).flatten(1) / factor_K - weight
            error += ((off @ inputs.gram) * off).sum().item()
        return error


def _candidates(seam: FoldPair, weights: list[Tensor], inputs: Moments) -> Iterator[Tensor]:
    """Factors x^r, and x^r / w^(1-r) with w the weights' mean share of their group, for r from 0 to 1."""
    size = seam.gather(inputs.mean).clamp_min(1e-4)
    shares = torch.cat([weight.abs() / weight.abs().amax(1, keepdim=True).clamp_min(1e-8) for weight in weights])
    share = seam.gather(shares.mean(0)).clamp_min(1e-4)
    yield torch.ones_like(size)
    for step in range(1, _EXPONENTS + 1):
        exponent = step / _EXPONENTS
        for factor in (size**exponent, size**exponent / share ** (1 - exponent)):
            yield factor / (factor.amax() * factor.amin()).sqrt()
