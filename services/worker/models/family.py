"""What a family of models defines: how its config.json is read, and what its tensors are called. Imports no torch.

A decoder is made of parts. A family's two tables name, for each part, the modules of a checkpoint that fill it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from services.worker.models.config import ModelConfig
from services.worker.models.raw_config import RawConfig


class Part(Enum):
    """A part of a decoder that has weights."""

    EMBEDDING = auto()
    POSITIONS = auto()
    """The table of learned positions."""
    FINAL_NORM = auto()
    HEAD = auto()
    """Left out where it is the embedding."""
    ATTENTION_NORM = auto()
    QKV = auto()
    """Queries, keys and values, one after another."""
    Q_NORM = auto()
    K_NORM = auto()
    OUTPUT = auto()
    """The projection after attention."""
    ATTENTION_AFTER_NORM = auto()
    """The norm of attention's output."""
    MLP_NORM = auto()
    MLP_AFTER_NORM = auto()
    """The norm of the MLP's output."""
    UP = auto()
    """The first projection of the MLP: gate and up, one after another, if the activation is gated."""
    DOWN = auto()
    ROUTER = auto()
    """The product that chooses experts."""
    EXPERT_UP = auto()
    """As UP, of one expert; {expert} in its modules' names is the expert's number."""
    EXPERT_DOWN = auto()


class Split(Enum):
    """How the ranks of tensor parallelism share a part's weights."""

    COLUMN = auto()
    """Each rank has some of the outputs and their biases; of an embedding, some of the vocabulary."""
    ROW = auto()
    """Each rank has some of the inputs; the ranks' products are summed, and the bias is added once."""
    REPLICATED = auto()
    """Each rank has all of it. So has a rank of its experts where ranks have whole ones."""


@dataclass(frozen=True, slots=True)
class PartNames:
    """The modules of a checkpoint that fill a part."""

    part: Part
    split: Split
    modules: tuple[str, ...]
    """Their outputs follow one another in the part; one module alone has all outputs. {layer} is the layer's number."""
    transposed: bool = False
    """The checkpoint stores the weights as [inputs, outputs]."""


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that share one way to read config.json and one set of tensor names."""

    architectures: tuple[str, ...]
    """As `architectures` of config.json names them."""
    read_config: Callable[[RawConfig], ModelConfig]
    """Everything but end tokens and the dtype of keys and values. Raises CheckpointError."""
    outside: tuple[PartNames, ...]
    """Parts outside the layers."""
    layer: tuple[PartNames, ...]
    """Parts of one layer; those that the model does not have are skipped."""
    tensor_name: Callable[[str], str | None]
    """The name that these tables give a tensor of a checkpoint; None: the tensor holds no weights."""
