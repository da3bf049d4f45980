"""Writes a network whose weights changed but whose format did not: shards layer by layer, config with what differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress.checkpoint import Workspace, as_stored
from compress.network import layers_of, outside_layers, read_config, stored_dtype


def pieces(model: PreTrainedModel) -> int:
    """Shards of a network: one for each layer and one for the rest."""
    return len(layers_of(model)) + 1


def write(model: PreTrainedModel, shape_of: Path, bench: Workspace, changed: Mapping[str, Any] | None = None) -> None:
    """Finish the bench's checkpoint with this network; its config is that of `shape_of` but for `changed`."""
    config = read_config(shape_of)
    dtype = stored_dtype(config)
    for index, layer in enumerate(layers_of(model)):
        named = {f"model.layers.{index}.{name}": weight for name, weight in layer.named_parameters()}
        bench.write(index, as_stored(named, dtype))
    bench.write(len(layers_of(model)), as_stored(outside_layers(model), dtype))
    bench.finish(config | dict(changed or {}))
