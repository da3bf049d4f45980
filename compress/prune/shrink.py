"""Structured pruning: removes whole neurons, groups of heads and layers, then trains the rest.

What is left is an ordinary smaller network. Neurons and heads matter by the energy that they add to the residual
stream, and those that stay take over what they can; layers matter by how far they turn it (ShortGPT, Men et al.,
arXiv:2403.03853). Healing distils the base into what is left, as Minitron does (Muralidharan et al., arXiv:2407.14679).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import text
from compress.base.columns import keep_columns
from compress.base.network import SEEN, LayerStats, Stream, head_dim, layers_of, linear, load, on_device, read_config
from compress.errors import CompressError
from compress.output import dense
from compress.output.checkpoint import Workspace
from compress.progress import Progress
from compress.training.run import Plan, distillation, train

_MULTIPLE = 32
"""The number of remaining neurons is a multiple of this, so that it can be divided into groups."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How much is removed."""

    neurons: float = 0.25
    """Share of each MLP's neurons to remove."""
    kv_heads: int = 0
    """Key/value heads of each layer to remove, with their query heads."""
    layers: int = 0


def shrink(base: Path, out: Path, windows_WT: Tensor, cut: Cut, heal: Plan, progress: Progress) -> None:
    """Remove parts, then distill from the base. Raises CompressError if nothing would be left."""
    model, config = load(base), read_config(base)
    if not (0 <= cut.neurons < 1 and cut.layers < config["num_hidden_layers"] and cut.kv_heads < _kv_heads(config)):
        raise CompressError("nothing would be left: cut fewer neurons, heads or layers")
    layers = layers_of(model)
    settings = {"method": "shrink", **asdict(cut), **asdict(heal), "text": text.described(windows_WT)}
    workspace = Workspace(base, out, settings, len(layers) - cut.layers + 1)
    stream, turned = Stream(model, windows_WT[:SEEN]), []
    for index, layer in enumerate(layers):
        progress("layers", index, len(layers))
        with on_device(layer):
            before, seen = stream.hidden_WTC, stream.look(index)
            stream.advance(index)
            turned.append(1 - F.cosine_similarity(before, stream.hidden_WTC, dim=-1).mean().item())
            _cut_neurons(layer, seen, cut.neurons)
            _cut_heads(layer, seen, cut.kv_heads)
    progress("layers", len(layers), len(layers))
    stays = sorted(
        sorted(range(len(layers)), key=lambda index: turned[index], reverse=True)[: len(layers) - cut.layers]
    )
    model.get_submodule("model").layers = nn.ModuleList(layers[index] for index in stays)
    model.config.num_hidden_layers = len(stays)
    if heal.steps:
        train(model, windows_WT, distillation(model, load(base)), heal, workspace, progress)
    dense.write(model, base, workspace, _changed(model, config, stays))


def _cut_neurons(layer: nn.Module, seen: LayerStats, share: float) -> None:
    if not share:
        return
    down = linear(layer, "mlp.down_proj")
    gram = seen.inputs["mlp.down_proj"].gram
    energy = gram.diagonal() * down.weight.detach().square().sum(0)
    count = max(1, round(len(energy) * (1 - share) / _MULTIPLE)) * _MULTIPLE
    stays = energy.topk(min(count, len(energy))).indices.sort().values
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        _keep_outputs(linear(layer, name), stays)
    _keep_inputs(down, stays, gram)


def _cut_heads(layer: nn.Module, seen: LayerStats, count: int) -> None:
    if not count:
        return
    output, width = linear(layer, "self_attn.o_proj"), head_dim(layer)
    kv_heads = linear(layer, "self_attn.k_proj").out_features // width
    gram = seen.inputs["self_attn.o_proj"].gram
    energy = gram.diagonal() * output.weight.detach().square().sum(0)
    heads = energy.view(kv_heads, -1).sum(1).topk(kv_heads - count).indices.sort().values
    queries = torch.arange(output.in_features, device=heads.device).view(kv_heads, -1)[heads].flatten()
    keys = torch.arange(kv_heads * width, device=heads.device).view(kv_heads, -1)[heads].flatten()
    _keep_outputs(linear(layer, "self_attn.q_proj"), queries)
    _keep_outputs(linear(layer, "self_attn.k_proj"), keys)
    _keep_outputs(linear(layer, "self_attn.v_proj"), keys)
    _keep_inputs(output, queries, gram)


def _keep_outputs(module: nn.Linear, stays: Tensor) -> None:
    module.weight = nn.Parameter(module.weight.detach()[stays])
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[stays])
    module.out_features = len(stays)


def _keep_inputs(module: nn.Linear, stays: Tensor, gram_KK: Tensor) -> None:
    if len(stays) < module.in_features:
        module.weight = nn.Parameter(keep_columns(module.weight.detach(), gram_KK, stays))
    module.in_features = len(stays)


def _changed(model: PreTrainedModel, config: dict[str, Any], stays: list[int]) -> dict[str, Any]:
    """The config.json entries of the smaller network."""
    layer = layers_of(model)[0]
    width = head_dim(layer)
    changed: dict[str, Any] = {
        "num_hidden_layers": len(stays),
        "intermediate_size": linear(layer, "mlp.up_proj").out_features,
        "num_attention_heads": linear(layer, "self_attn.q_proj").out_features // width,
        "num_key_value_heads": linear(layer, "self_attn.k_proj").out_features // width,
        "head_dim": width,
    }
    if config.get("use_sliding_window"):  # From this layer on; without it from the 29th, as transformers reads it.
        first = config.get("max_window_layers", 28)
        changed["max_window_layers"] = sum(index < first for index in stays)
    if config.get("layer_types"):
        changed["layer_types"] = [config["layer_types"][index] for index in stays]
    return changed


def _kv_heads(config: dict[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])
