"""Quantization-aware training: weights are trained while each forward pass rounds them to INT4 (arXiv:1712.05877).

GPTQ gives the initial weights and the scales, which stay fixed. Gradients pass through the rounding unchanged. The base
is the teacher.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from compress import text
from compress.base.linears import LINEARS
from compress.base.network import (
    SEEN,
    Stream,
    layers_of,
    linear,
    load,
    on_device,
    outside_layers,
    read_config,
    stored_dtype,
)
from compress.output.checkpoint import Workspace, as_stored
from compress.progress import Progress
from compress.quantize import layout
from compress.quantize.gptq import Gptq
from compress.quantize.recipe import Rounded
from compress.quantize.rounding import Steps, grouped, int4_weight
from compress.quantize.run import layer_tensors, round_layer
from compress.training.run import Plan, distillation, train
from kernels.quantized_weights import INT4_ZERO, Int4Weight


class _AsRounded(nn.Module):
    """Rounds a weight to its stored values; the gradient passes unchanged."""

    def __init__(self, scale_NB: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale_NB[..., None].float())
        self.scale: Tensor

    @property
    def steps(self) -> Steps:
        return Steps(self.scale, torch.full_like(self.scale, INT4_ZERO))

    def grouped(self, weight_NK: Tensor) -> Tensor:
        return grouped(weight_NK, weight_NK.shape[1] // self.scale.shape[1])

    def forward(self, weight_NK: Tensor) -> Tensor:
        with torch.no_grad():
            off = self.steps.rounded(self.grouped(weight_NK)).view_as(weight_NK) - weight_NK
        return weight_NK + off


def qat(base: Path, out: Path, windows_WT: Tensor, plan: Plan, progress: Progress, *, group: int = 32) -> float:
    """Train, round, write symmetric INT4 -> the last loss in nats per token."""
    model, config = load(base), read_config(base)
    settings = {"method": "qat", "group": group, "text": text.described(windows_WT), **asdict(plan)}
    layers = layers_of(model)
    workspace = Workspace(base, out, settings, len(layers) + 1)
    begun = workspace.kept("begun")
    if begun is None:
        begun = _begin(model, windows_WT[:SEEN], group, progress)
        workspace.keep("begun", begun)
    roundings = [{name: _AsRounded(begun[f"{index}.{name}.scale"]) for name in LINEARS} for index in range(len(layers))]
    for index, layer in enumerate(layers):
        for name in LINEARS:
            linear(layer, name).weight.data.copy_(begun[f"{index}.{name}.weight"])
            parametrize.register_parametrization(linear(layer, name), "weight", roundings[index][name])
    loss = train(model, windows_WT, distillation(model, load(base)), plan, workspace, progress)
    scheme, dtype = layout.int4(group, symmetric=True), stored_dtype(config)
    for index, layer in enumerate(layers):
        workspace.write(index, layer_tensors(layer, index, _rounded(layer, roundings[index]), scheme, dtype))
    workspace.write(len(layers), as_stored(outside_layers(model), dtype))
    workspace.finish(config | {"quantization_config": scheme.quantization_config()})
    return loss


def _begin(model: PreTrainedModel, windows_WT: Tensor, group: int, progress: Progress) -> dict[str, Tensor]:
    """Round by GPTQ -> weights and scales by layer and linear."""
    stream, begun = Stream(model, windows_WT), dict[str, Tensor]()
    for index, layer in enumerate(stream.layers):
        progress("layers", index, len(stream.layers))
        with on_device(layer):
            rounded = round_layer(layer, index, Gptq(group), stream)
        for name, weight in rounded.weights.items():
            assert isinstance(weight, Int4Weight)
            begun[f"{index}.{name}.scale"] = weight.scale.cpu()
            begun[f"{index}.{name}.weight"] = weight.dequantize(torch.float32).cpu()
    progress("layers", len(stream.layers), len(stream.layers))
    return begun


def _rounded(layer: nn.Module, roundings: Mapping[str, _AsRounded]) -> Rounded:
    """Replace the rounding modules by rounded weights."""
    weights = {}
    for name, rounding in roundings.items():
        parametrize.remove_parametrizations(linear(layer, name), "weight", leave_parametrized=False)
        groups = rounding.grouped(linear(layer, name).weight.detach())
        weights[name] = int4_weight(rounding.steps.nearest(groups), rounding.steps, symmetric=True)
    return Rounded(weights)
