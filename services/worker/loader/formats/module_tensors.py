"""Hands out the tensors of one module of a quantized checkpoint and checks them. Knows names and shapes, no format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.loader.tensors import FLOATS, TensorHeader, type_name

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a checkpoint, and which of them have been read."""

    headers: dict[str, TensorHeader]
    fetch: Callable[[str], Tensor]
    """Reads the tensor of a name to the device of the model."""
    taken: set[str] = field(default_factory=set)
    """Names of the tensors that have been read."""


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one linear module, by their names within it."""

    tensors: Tensors
    module: str
    """For example model.layers.0.self_attn.q_proj."""

    def header(self, name: str) -> TensorHeader | None:
        """The header of a tensor; None: the checkpoint has no tensor of this name."""
        return self.tensors.headers.get(f"{self.module}.{name}")

    def take(self, name: str, dtypes: Sequence[torch.dtype], *shapes: Shape) -> Tensor:
        """Read a tensor, whose type and shape must be among these. Raises CheckpointError."""
        header, full = self.header(name), f"{self.module}.{name}"
        if header is None:
            raise CheckpointError(f"tensor {full} is missing")
        if header.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {full} has type {type_name(header.dtype)}, expected is {type_name(dtypes[0])}"
            )
        if shapes and header.shape not in [tuple(shape) for shape in shapes]:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
            raise CheckpointError(f"tensor {full} has shape {list(header.shape)}, expected is {expected}")
        self.tensors.taken.add(full)
        return self.tensors.fetch(full)

    def take_finite(self, name: str, *shapes: Shape) -> Tensor:
        """Read a tensor that is not quantized and whose numbers are finite. Raises CheckpointError."""
        tensor = self.take(name, FLOATS, *shapes)
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"tensor {self.module}.{name} holds numbers that are not finite")
        return tensor

    def refuse(self, reason: str) -> CheckpointError:
        """The error for a module that cannot be read, with its name and the reason."""
        return CheckpointError(f"{self.module}: {reason}")


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack numbers of `bits` bits from int32 words, lowest bits first: [..., n] -> uint8 [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(-2)
