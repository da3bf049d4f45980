"""Quantization-aware training: weights learn while every forward sees them rounded to INT4 (Jacob et al., 1712.05877).

The gradient passes the rounding as if it were not there. The base is the teacher, so the network stays what it was.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress import layout
from compress.checkpoint import Workbench, as_stored
from compress.network import LINEARS, layers_of, linear, load, outside_layers, read_config, stored_dtype
from compress.progress import Progress
from compress.quantize import layer_tensors
from compress.recipe import Rounded
from compress.rounding import grouped, int4_weight, steps_of
from compress.training import Plan, distillation, train


class _AsRounded(nn.Module):
    """A weight as it will be read again; its gradient is the weight's."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, weight_NK: Tensor) -> Tensor:
        with torch.no_grad():
            groups = grouped(weight_NK, self.group)
            off = steps_of(groups, symmetric=True).rounded(groups).view_as(weight_NK) - weight_NK
        return weight_NK + off


def qat(base: Path, out: Path, windows_WT: Tensor, plan: Plan, progress: Progress, *, group: int = 32) -> float:
    """Train, round for good, write symmetric INT4. -> the last loss, nats a token."""
    model, teacher, config = load(base), load(base), read_config(base)
    settings = {"method": "qat", "group": group, "windows": list(windows_WT.shape), **asdict(plan)}
    layers = layers_of(model)
    bench = Workbench(base, out, settings, len(layers) + 1)
    for layer in layers:
        for name in LINEARS:
            parametrize.register_parametrization(linear(layer, name), "weight", _AsRounded(group))
    loss = train(model, windows_WT, distillation(model, teacher), plan, bench, progress)
    scheme, dtype = layout.int4(group, symmetric=True), stored_dtype(config)
    for index, layer in enumerate(layers):
        bench.write(index, layer_tensors(layer, index, _rounded(layer, group), scheme, dtype))
    bench.write(len(layers), as_stored(outside_layers(model), dtype))
    bench.finish(config | {"quantization_config": scheme.quantization_config()})
    return loss


def _rounded(layer: nn.Module, group: int) -> Rounded:
    """Take the rounding out of the network again, and do it for good."""
    weights = {}
    for name in LINEARS:
        parametrize.remove_parametrizations(linear(layer, name), "weight", leave_parametrized=False)
        groups = grouped(linear(layer, name).weight.detach(), group)
        steps = steps_of(groups, symmetric=True)
        weights[name] = int4_weight(steps.nearest(groups), steps, symmetric=True)
    return Rounded(weights)
