"""Writes a network with changed weights in an unchanged format: shards by layer, and the changed config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress.base.network import layers_of, outside_layers, read_config, stored_dtype
from compress.output.checkpoint import Workspace, as_stored


def pieces(model: PreTrainedModel) -> int:
    """Number of shards: one for each layer and one for the rest."""
    return len(layers_of(model)) + 1


def write(
    model: PreTrainedModel, shape_of: Path, workspace: Workspace, changed: Mapping[str, Any] | None = None
) -> None:
    """Write the network and finish the workspace; the config is that of `shape_of` with the entries of `changed`."""
    config = read_config(shape_of)
    dtype = stored_dtype(config)
    for index, layer in enumerate(layers_of(model)):
        named = {f"model.layers.{index}.{name}": weight for name, weight in layer.named_parameters()}
        workspace.write(index, as_stored(named, dtype))
    workspace.write(len(layers_of(model)), as_stored(outside_layers(model), dtype))
    workspace.finish(config | dict(changed or {}))
