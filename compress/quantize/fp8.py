"""FP8 (e4m3) weights and inputs (the format of Micikevicius et al., arXiv:2209.05433).

Inputs have a scale per token, computed when serving, or a static one from calibration. Optionally calibrates scales of
keys and values.
"""

from dataclasses import dataclass

import torch
from torch import nn

from compress.base.network import LayerStats, linear, linears_of
from compress.choices import Granularity
from compress.quantize import layout
from compress.quantize.recipe import Recipe, Rounded
from compress.quantize.rounding import as_written, round_fp8
from kernels.quantized_weights import FP8_MAX


@dataclass(frozen=True, slots=True)
class Fp8(Recipe):
    """Weights with a scale per output (`channel`), per weight (`tensor`) or per block of 128 x 128 (`block`)."""

    granularity: Granularity = Granularity.CHANNEL
    static: bool = False
    """Inputs have one static scale (largest input in calibration / 448) instead of one per token."""
    kv: bool = False
    """Write calibrated scales of keys and values."""

    @property
    def calibrated(self) -> bool:
        """Static scales need calibration text."""
        return self.static or self.kv

    @property
    def scheme(self) -> layout.Scheme:
        """float-quantized."""
        return layout.fp8(self.granularity, static=self.static, kv=self.kv)

    def round(self, layer: nn.Module, seen: LayerStats | None, /) -> Rounded:
        """Round each linear to nearest; scales of inputs, keys and values come from calibration."""
        weights = {}
        for name in linears_of(layer):
            scale = _scale(seen.inputs[name].largest.max().item()) if self.static and seen else None
            weights[name] = round_fp8(linear(layer, name).weight.detach(), self.granularity, scale)
        if not (self.kv and seen):
            return Rounded(weights)
        extras = {"self_attn.k_scale": _scale(seen.key_max), "self_attn.v_scale": _scale(seen.value_max)}
        return Rounded(weights, {name: scale.view(1).bfloat16() for name, scale in extras.items()})


def _scale(largest: float) -> torch.Tensor:
    return as_written(torch.tensor(max(largest, 1e-8) / FP8_MAX))
