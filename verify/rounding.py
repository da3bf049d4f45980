"""Rounding error of each linear with a scale per output and with one scale per weight. Knows weights, no outputs."""

from typing import Any

import torch
from torch import Tensor

from compress.choices import Granularity
from compress.quantize.rounding import round_fp8, round_int8
from kernels.plain_cpu import PackedProduct
from services.worker.models.family import Part
from verify.served import Served

_NAMES = {
    Part.QKV: "qkv",
    Part.OUTPUT: "o",
    Part.UP: "gate up",
    Part.DOWN: "down",
    Part.EXPERT_UP: "experts' gate up",
    Part.EXPERT_DOWN: "experts' down",
}
KINDS = ("int8 per channel", "int8 per tensor", "fp8 per channel", "fp8 per tensor")


def by_granularity(base: Served) -> list[dict[str, Any]]:
    """For each linear of the base: its name and the relative error of each kind of rounding; of experts the mean."""
    found = []
    for number, layer in enumerate(base.model.layers):
        for part, linears in layer.linears().items():
            weights = [plain(linear.weight) for linear in linears if isinstance(linear.weight, Tensor | PackedProduct)]
            if len(weights) == len(linears):
                errors = [_errors(weight.float().cpu()) for weight in weights]
                means = {kind: sum(each[kind] for each in errors) / len(errors) for kind in KINDS}
                found.append({"linear": f"{number} {_NAMES[part]}", **means})
    return found


def plain(weight: Tensor | PackedProduct) -> Tensor:
    """A weight that is not quantized, [outputs, inputs]."""
    return weight.dense() if isinstance(weight, PackedProduct) else weight


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
