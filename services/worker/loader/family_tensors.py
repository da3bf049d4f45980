"""The tensors of a checkpoint by the names of its family. Knows how names differ, never what a tensor is for.

Some checkpoints stack the weights of all experts of a layer in one tensor, [experts, outputs, inputs]. An expert's part
of it is contiguous, so it is listed as a tensor of its own and read where it lies.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from services.worker.loader.tensors import FLOATS, Checkpoint, TensorHeader, open_checkpoint
from services.worker.models.config import ModelConfig
from services.worker.models.family import Part, PartNames
from services.worker.models.registry import family_of

_STACKS = {Part.EXPERT_UP: "gate_up_proj", Part.EXPERT_DOWN: "down_proj"}
"""What a stack is called beside the experts' numbers."""


def open_family(
    folder: Path, config: ModelConfig, tensor_name: Callable[[str], str | None] | None = None
) -> Checkpoint:
    """Open a checkpoint and name its tensors as its family does. tensor_name: instead of the family's own. Raises
    CheckpointError."""
    family = family_of(config.architecture)
    checkpoint = open_checkpoint(folder).renamed(tensor_name or family.tensor_name)
    headers = dict(checkpoint.headers)
    for names in family.layer:
        if names.part in _STACKS and config.moe is not None:
            for layer in range(config.layers):
                stack = names.modules[0].format(layer=layer, expert="").split("..")[0] + f".{_STACKS[names.part]}"
                if stack in headers:
                    headers |= _parts(stack, headers.pop(stack), names, layer)
    return replace(checkpoint, headers=headers)


def has_own_head(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether the files hold a plain head of other numbers than the embedding. transformers draws from such a head even
    if config.json ties the two, as training that begins with tied ones may leave it. Raises CheckpointError."""
    names = {each.part: f"{each.modules[0]}.weight" for each in family_of(config.architecture).outside}
    embedding, head = names[Part.EMBEDDING], names[Part.HEAD]
    headers = [checkpoint.headers.get(name) for name in (embedding, head)]
    if not all(header is not None and header.dtype in FLOATS for header in headers):
        return False
    with checkpoint.opened() as read:
        words = read(embedding)
        return not torch.equal(read(head).to(words.dtype), words)


def _parts(stack: str, whole: TensorHeader, names: PartNames, layer: int) -> Iterator[tuple[str, TensorHeader]]:
    """The tensors of each expert's modules: equal parts, one after another, of the expert's rows."""
    if len(whole.shape) != 3 or whole.shape[1] % len(names.modules):
        yield stack, whole  # refused later, by its name
        return
    experts, rows, inputs = whole.shape
    count = rows // len(names.modules)
    for expert in range(experts):
        for index, module in enumerate(names.modules):
            first = index * count
            begin = whole.offset + (expert * rows + first) * inputs * whole.dtype.itemsize
            stored = replace(
                whole,
                shape=(count, inputs),
                offset=begin,
                stored_name=whole.stored_name or stack,
                place=(expert, first),
            )
            yield f"{module.format(layer=layer, expert=expert)}.weight", stored
