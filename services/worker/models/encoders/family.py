"""What a family of encoders defines: how its config.json is read, and what its tensors are called. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kernels.operands import Activation
from services.worker.errors import CheckpointError
from services.worker.models.encoders.config import EncoderConfig, HeadConfig
from services.worker.models.raw_config import RawConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_MOST_LABELS = 4096
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


class EncoderPart(Enum):
    """A part of an encoder that has weights."""

    TOKENS = auto()
    POSITIONS = auto()
    SEGMENTS = auto()
    EMBEDDING_NORM = auto()
    EMBEDDING_PROJECTION = auto()
    """From the width of the table of tokens to the hidden size."""
    QKV = auto()
    """Queries, keys and values: three modules."""
    OUTPUT = auto()
    """The projection after attention."""
    ATTENTION_NORM = auto()
    """The norm of the sum of attention's output and its input."""
    UP = auto()
    DOWN = auto()
    MLP_NORM = auto()
    """The norm of the sum of the MLP's output and its input."""
    HEAD_DENSE = auto()
    HEAD_LABELS = auto()


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Architectures that share one way to read config.json and one set of tensor names."""

    architectures: tuple[str, ...]
    """As `architectures` of config.json names them. Those that end with ForSequenceClassification have a head."""
    read_config: Callable[[RawConfig], EncoderConfig]
    """Raises CheckpointError."""
    modules: Mapping[EncoderPart, tuple[str, ...]]
    """The modules of a checkpoint that fill a part; {layer} is the number of the layer."""
    prefix: str
    """What the names of a model's tensors begin with where it is a part of another model."""
    unread: tuple[str, ...]
    """What the names of tensors begin with that an encoder does not read: heads over the vocabulary, poolers."""

    def tensor_name(self, stored: str) -> str | None:
        """The name that `modules` gives a tensor of a checkpoint; None: it is not read."""
        name = stored.removeprefix(self.prefix)
        module, _, kind = name.rpartition(".")
        if kind in ("position_ids", "token_type_ids"):
            return None
        name = f"{module}.{_OLD_NAMES.get(kind, kind)}"
        return None if name.startswith(self.unread) and not self._is_of_head(name) else name

    def tensor_name_without_head(self, stored: str) -> str | None:
        """The same for a model that has no head, although its checkpoint may have a pooler."""
        name = self.tensor_name(stored)
        return None if name is None or (name.startswith(self.unread) and self._is_of_head(name)) else name

    def _is_of_head(self, name: str) -> bool:
        of_head = (*self.modules[EncoderPart.HEAD_DENSE], *self.modules[EncoderPart.HEAD_LABELS])
        return name.startswith(tuple(f"{module}." for module in of_head))


def has_head(architecture: str) -> bool:
    """Whether an architecture has a head that scores labels."""
    return architecture.endswith("ForSequenceClassification")


def read_activation(raw: RawConfig, name: str, default: str = "gelu") -> Activation:
    """The activation of the MLP. Raises CheckpointError."""
    activation = str(raw.get(name, default))
    if activation not in _ACTIVATIONS:
        raise CheckpointError(f"{name} {activation} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def read_heads(raw: RawConfig, heads: str, width: str) -> int:
    """The number of heads, which divides the width. Raises CheckpointError."""
    count, size = raw.integer(heads), raw.integer(width)
    if size % count:
        raise CheckpointError(f"config.json: {width} {size} is not {count} heads")
    return count


def read_head(raw: RawConfig, activation: str) -> HeadConfig | None:
    """The head that scores labels; None: the architecture has none. Raises CheckpointError."""
    if not has_head(raw.architecture):
        return None
    named = raw.section("id2label").values
    count = len(named) or raw.integer("num_labels", 2)
    if count > _MOST_LABELS or (named and set(named) != {str(label) for label in range(count)}):
        raise CheckpointError(f"config.json: id2label does not number at most {_MOST_LABELS} labels from 0")
    if count > 1 and raw.get("problem_type") == "regression":
        raise CheckpointError(f"problem_type regression is not supported with {count} labels: these have no shares")
    labels = tuple(str(named.get(str(label), f"LABEL_{label}")) for label in range(count))
    return HeadConfig(activation, labels, raw.get("problem_type") == "multi_label_classification")


def refuse(raw: RawConfig, **expected: object) -> None:
    """Raises CheckpointError for the first of these settings that is there and has another value."""
    for name, value in expected.items():
        if raw.get(name, value) not in (value, None):
            raise CheckpointError(f"{name} {raw.get(name)} is not supported; supported is {value}")
