"""Finds the draft heads that the options name, checks that they are for the served model, and loads them.

Knows files and shapes, no steps.
"""

from pathlib import Path

import torch

from kernels.drafts.draft_heads import base_digest
from services.worker.build.drafting.heads_config import read_heads
from services.worker.errors import CheckpointError
from services.worker.loader.plain import load_weights
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.draft_heads import DraftHeads, HeadsConfig
from services.worker.models.family import Part
from services.worker.models.registry import family_of
from services.worker.options import EngineOptions, Progress


def locate_heads(options: EngineOptions, served: ModelConfig, weights: Checkpoint | None) -> HeadsConfig:
    """What the heads are. weights: of the served model; None: random ones. Raises CheckpointError
    if the heads were not trained for this model."""
    heads = read_heads(Path(options.heads).expanduser())
    for its, what, wanted in (
        (heads.layer.hidden_size, "a width of", served.hidden_size),
        (heads.base_vocab, "a vocabulary of", served.vocab_size),
        (heads.base_layers, "a depth of", served.layers),
    ):
        if its != wanted:
            raise CheckpointError(f"the draft heads are for {what} {its}, the served model has one of {wanted}")
    if weights is None or heads.base_digest != _digest(served, weights):
        raise CheckpointError("the draft heads were trained for another model: its embedding is not the served one's")
    return heads


def _digest(served: ModelConfig, weights: Checkpoint) -> str:
    outside = family_of(served.architecture).outside
    (module,) = next(names.modules for names in outside if names.part is Part.EMBEDDING)
    name = f"{module}.weight"
    if name not in weights.headers:
        raise CheckpointError(f"tensor {name} is missing")
    with weights.opened() as read:
        return base_digest(read(name))


def load_heads(
    options: EngineOptions, config: HeadsConfig, base: Decoder, dtype: torch.dtype, context: int, progress: Progress
) -> DraftHeads:
    """The heads with their weights, beside the model that they guess for. Raises CheckpointError."""
    heads = DraftHeads(config, base, dtype, context)
    load_weights(heads, open_checkpoint(Path(options.heads).expanduser()), progress)
    return heads
