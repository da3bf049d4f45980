"""Rounding error of each linear with a scale per output and with one scale per weight. Knows weights, no outputs."""

from typing import Any

import torch
from torch import Tensor

from compress.choices import Granularity
from compress.rounding import round_fp8, round_int8
from verify.served import Served

KINDS = ("int8 per channel", "int8 per tensor", "fp8 per channel", "fp8 per tensor")


def by_granularity(base: Served) -> list[dict[str, Any]]:
    """For each linear of the base: its name and the relative error of each kind of rounding."""
    found = []
    for number, layer in enumerate(base.model.layers):
        linears = {
            "qkv": layer.attention.qkv,
            "o": layer.attention.output,
            "gate up": layer.mlp.up,
            "down": layer.mlp.down,
        }
        for name, linear in linears.items():
            if isinstance(linear.weight, Tensor):
                found.append({"linear": f"{number} {name}", **_errors(linear.weight.float().cpu())})
    return found


def _errors(weight_NK: Tensor) -> dict[str, float]:
    rounded = (
        round_int8(weight_NK),
        round_int8(weight_NK, per_tensor=True),
        round_fp8(weight_NK, Granularity.CHANNEL),
        round_fp8(weight_NK, Granularity.TENSOR),
    )
    size = weight_NK.norm()
    off = (float((each.dequantize(torch.float32) - weight_NK).norm() / size) for each in rounded)
    return dict(zip(KINDS, off, strict=True))
