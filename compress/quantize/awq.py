"""AWQ, activation-aware weight quantization to 4 bits (Lin et al., arXiv:2306.00978).

Rounding errors of weights with large inputs are costly. So these weights are multiplied by a factor before rounding,
and the norm or linear that produces the inputs is divided by it. Then columns are rounded one after another, each
compensating the errors of those before it (`compress.quantize.gptq`), or, as in the paper, all are rounded to nearest
after each group's range was clipped. Searches minimize the mean squared error of the linear's output, computed from the
inputs' second moments.

Legend: N outputs, K inputs, B groups of a row, G inputs of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.base.linears import LINEARS
from compress.base.network import LayerStats, Moments, linear
from compress.quantize import layout
from compress.quantize.folding import FoldPair, fold_pairs, scaled
from compress.quantize.gptq import round_together
from compress.quantize.recipe import Recipe, Rounded
from compress.quantize.rounding import cheapest_steps, grouped, int4_weight, steps_of

_EXPONENTS = 12
_UNCUT = ("self_attn.q_proj", "self_attn.k_proj")
"""Their errors pass through a softmax: the paper does not clip their ranges."""


@dataclass(frozen=True, slots=True)
class Awq(Recipe):
    """4-bit weights in groups of inputs."""

    group: int = 64
    symmetric: bool = False
    compensate: bool = True
    """Columns compensate one another's errors; otherwise ranges are clipped and weights rounded to nearest."""
    calibrated = True

    @property
    def scheme(self) -> layout.Scheme:
        """pack-quantized."""
        return layout.int4(self.group, symmetric=self.symmetric)

    def round(self, layer: nn.Module, seen: LayerStats | None, /) -> Rounded:
        """Fold factors at every pair of the layer, then round."""
        assert seen is not None
        inputs = dict(seen.inputs)
        for pair in fold_pairs(layer):
            factor = self._factor(layer, pair, inputs[pair.readers[0]])
            moved = pair.move(layer, factor)
            for name in pair.readers:
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

    def _factor(self, layer: nn.Module, pair: FoldPair, inputs: Moments) -> Tensor:
        """The factor of each channel with the least error of the readers' outputs."""
        weights = [linear(layer, name).weight.detach() for name in pair.readers]
        return min(_candidates(pair, weights, inputs), key=lambda factor: self._error(pair, weights, inputs, factor))

    def _error(self, pair: FoldPair, weights: list[Tensor], inputs: Moments, factor_C: Tensor) -> float:
        factor_K, error = pair.spread(factor_C), 0.0
        for weight in weights:
            scaled_up = grouped(weight * factor_K, self.group)
            off = steps_of(scaled_up, self.symmetric).rounded(scaled_up).flatten(1) / factor_K - weight
            error += ((off @ inputs.gram) * off).sum().item()
        return error


def _candidates(pair: FoldPair, weights: list[Tensor], inputs: Moments) -> Iterator[Tensor]:
    """Factors x^r, and x^r / w^(1-r) with w the weights' mean share of their group, for r from 0 to 1."""
    size = pair.gather(inputs.mean).clamp_min(1e-4)
    shares = torch.cat([weight.abs() / weight.abs().amax(1, keepdim=True).clamp_min(1e-8) for weight in weights])
    share = pair.gather(shares.mean(0)).clamp_min(1e-4)
    yield torch.ones_like(size)
    for step in range(1, _EXPONENTS + 1):
        exponent = step / _EXPONENTS
        for factor in (size**exponent, size**exponent / share ** (1 - exponent)):
            yield factor / (factor.amax() * factor.amin()).sqrt()
