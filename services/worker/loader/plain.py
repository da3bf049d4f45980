"""Fills a model with plain weights, tensor by tensor. Knows names and shapes, never how a product is computed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.loader.kv_scales import is_scale
from services.worker.loader.tensors import Checkpoint, check_plain
from services.worker.models.weighted import WeightedModel
from services.worker.options import Progress

RANDOM_STD = 0.02


def load_weights(model: WeightedModel, checkpoint: Checkpoint, progress: Progress) -> None:
    """Fill the model tensor by tensor, so that at most one tensor is in memory twice. Raises CheckpointError."""
    destinations = model.destinations()
    check_tensors(model, destinations, checkpoint)
    shards = len(checkpoint.shards)
    for shard in range(shards):
        progress("weights", shard, shards)
        for name, tensor in checkpoint.read_shard(shard):
            if name not in destinations:
                continue
            for view in destinations[name]:
                view.copy_(tensor)
            if not bool(torch.isfinite(destinations[name][0].sum(dtype=torch.float32))):
                raise CheckpointError(f"tensor {name} holds numbers that are not finite")
    progress("weights", shards, shards)


def randomize(model: WeightedModel, progress: Progress) -> None:
    """Random weights, made on the model's device; norms are ones. Never zeros: those can run faster than real ones."""
    generator = torch.Generator(model.embedding.device).manual_seed(0)
    destinations = model.destinations()
    for done, (name, views) in enumerate(destinations.items()):
        progress("weights", done, len(destinations))
        for view in views:
            if is_norm_weight(name, view.ndim):
                view.fill_(1)
            else:
                view.normal_(0, RANDOM_STD, generator=generator)
    progress("weights", len(destinations), len(destinations))


def pack_weights(model: WeightedModel) -> None:
    """Put the plain weights of products into the layout of their kernel, one after another."""
    for projection in model.projections():
        projection.linear.pack()


def is_norm_weight(name: str, dimensions: int) -> bool:
    """Whether a tensor scales normalized rows: of all weights only those have one dimension."""
    return dimensions == 1 and name.endswith(".weight")


def check_tensors(model: WeightedModel, destinations: dict[str, list[Tensor]], checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if a tensor is missing, is unknown, or has another shape than its destination."""
    _check_names(destinations, checkpoint.headers, model)
    for name, views in destinations.items():
        check_plain(name, checkpoint.headers[name])
        shape = checkpoint.headers[name].shape
        if tuple(views[0].shape) != shape:
            expected = list(views[0].shape)
            raise CheckpointError(f"tensor {name} has shape {list(shape)}, config.json says {expected}")


def _check_names(wanted: Iterable[str], found: Iterable[str], model: WeightedModel) -> None:
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise CheckpointError(f"tensor {missing[0]} is missing ({len(missing)} of {len(set(wanted))} are)")
    known_extras = {"lm_head.weight"} if model.config.tied_embeddings else set()
    for name in sorted(set(found) - set(wanted) - known_extras):
        if model.family.tensor_name(name) is not None and not is_scale(name, model.config.layers):
            raise CheckpointError(f"tensor {name} is not part of this architecture")
