"""Runs a quantization recipe: for each layer, observe its inputs, round, write, advance with the rounded weights."""

from pathlib import Path

import torch
from torch import Tensor, nn

from compress import text
from compress.base.experts import routers, stored_name
from compress.base.network import Stream, layers_of, linear, load, on_device, outside_layers, read_config, stored_dtype
from compress.output.checkpoint import Workspace, as_stored
from compress.progress import Progress
from compress.quantize.layout import Scheme, tensors_of
from compress.quantize.recipe import Recipe, Rounded


def quantize(base: Path, out: Path, recipe: Recipe, windows_WT: Tensor | None, progress: Progress) -> None:
    """Write `base`, rounded by `recipe`, to `out`. Calibrated recipes need windows of text. Raises CompressError."""
    model, config = load(base, with_experts=not recipe.calibrated), read_config(base)
    layers = layers_of(model)
    settings = recipe.settings() | ({} if windows_WT is None else {"text": text.described(windows_WT)})
    workspace = Workspace(base, out, settings, len(layers) + 1)
    stream = None
    if recipe.calibrated:
        assert windows_WT is not None
        stream = Stream(model, windows_WT)
        if kept := workspace.kept(f"hidden-{workspace.done}"):
            stream.go_on_from(kept["hidden"])
    dtype = stored_dtype(config)
    for index in range(workspace.done, len(layers)):
        progress("layers", index, len(layers))
        layer = layers[index]
        with on_device(layer):
            rounded = round_layer(layer, index, recipe, stream)
        if stream:
            workspace.keep(f"hidden-{index + 1}", {"hidden": stream.hidden_WTC})
        workspace.write(index, layer_tensors(layer, index, rounded, recipe.scheme, dtype))
        workspace.forget(f"hidden-{index}")
    progress("layers", len(layers), len(layers))
    workspace.write(len(layers), as_stored(outside_layers(model), dtype))
    scheme = recipe.scheme.quantization_config()
    scheme["ignore"] = [*scheme["ignore"], *routers(layers)]
    workspace.finish(config | {"quantization_config": scheme})


def round_layer(layer: nn.Module, index: int, recipe: Recipe, stream: Stream | None) -> Rounded:
    """Round a layer in place and advance the stream, so that later layers are calibrated on its rounded outputs."""
    rounded = recipe.round(layer, stream.look(index) if stream else None)
    for name, weight in rounded.weights.items():
        linear(layer, name).weight.data.copy_(weight.dequantize(torch.float32))
    if stream:
        stream.advance(index)
    return rounded


def layer_tensors(
    layer: nn.Module, index: int, rounded: Rounded, scheme: Scheme, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A rounded layer's tensors, keyed by their names in the checkpoint."""
    replaced = {f"{name}.weight" for name in rounded.weights}
    plain = {name: weight for name, weight in layer.named_parameters() if name not in replaced}
    tensors = as_stored(plain, dtype) | dict(rounded.extras)
    for name, weight in rounded.weights.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in tensors_of(weight, scheme).items()}
    return {f"model.layers.{index}.{stored_name(layer, name)}": tensor for name, tensor in tensors.items()}
