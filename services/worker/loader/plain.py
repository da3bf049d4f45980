"""Fills a model with plain weights, tensor by tensor. Knows names and shapes, never how a product is computed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.loader.kv_scales import is_scale
from services.worker.loader.tensors import Checkpoint, check_plain
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.options import Progress

RANDOM_STD = 0.02


def load_weights(model: Decoder, checkpoint: Checkpoint, progress: Progress) -> None:
    """Fill the model, tensor by tensor, so that never more than one is in memory twice. Raises CheckpointError."""
    places = model.destinations()
    check_shapes(places, checkpoint, model.config)
    shards = len(checkpoint.shards)
    for shard in range(shards):
        progress("weights", shard, shards)
        for name, tensor in checkpoint.read_shard(shard):
            if name not in places:
                continue
            for view in places[name]:
                view.copy_(tensor)
            if not bool(torch.isfinite(places[name][0].sum(dtype=torch.float32))):
                raise CheckpointError(f"tensor {name} holds numbers that are not finite")
    progress("weights", shards, shards)


def randomize(model: Decoder, progress: Progress) -> None:
    """Random weights, made on the model's device; norms are ones. Never zeros: those can run faster than real ones."""
    generator = torch.Generator(model.embedding.device).manual_seed(0)
    places = model.destinations()
    for done, (name, views) in enumerate(places.items()):
        progress("weights", done, len(places))
        for view in views:
            if "norm" in name:
                view.fill_(1)
            else:
                view.normal_(0, RANDOM_STD, generator=generator)
    progress("weights", len(places), len(places))


def check_shapes(places: dict[str, list[Tensor]], checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Whether the checkpoint has the tensors that go to these places. Raises CheckpointError."""
    _check_names(places, checkpoint.headers, config)
    for name, views in places.items():
        check_plain(name, checkpoint.headers[name])
        shape = checkpoint.headers[name].shape
        if tuple(views[0].shape) != shape:
            expected = list(views[0].shape)
            raise CheckpointError(f"tensor {name} has shape {list(shape)}, config.json says {expected}")


def _check_names(wanted: Iterable[str], found: Iterable[str], config: ModelConfig) -> None:
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise CheckpointError(f"tensor {missing[0]} is missing ({len(missing)} of {len(set(wanted))} are)")
    known_extras = {"lm_head.weight"} if config.tied_embeddings else set()
    for name in sorted(set(found) - set(wanted) - known_extras):
        if not name.endswith("rotary_emb.inv_freq") and not is_scale(name, config.layers):
            raise CheckpointError(f"tensor {name} is not part of this architecture")
