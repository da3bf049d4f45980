"""What a method of quantization is to the driver: what it needs to see, how it rounds one layer, what it writes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from compress.layout import Scheme
from compress.network import Seen
from kernels.quantized_weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Rounded:
    """A layer in fewer bits."""

    weights: Mapping[str, QuantizedWeight]
    """By the linear's name."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Other tensors that the layer's checkpoint holds."""


@dataclass(frozen=True, slots=True)
class Recipe(ABC):
    """One method with its settings, which are its fields."""

    @property
    @abstractmethod
    def calibrated(self) -> bool:
        """Whether it looks at text."""

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """How its linears lie in the checkpoint."""

    @abstractmethod
    def round(self, layer: nn.Module, seen: Seen | None, /) -> Rounded:
        """Round a layer's linears; it may move factors inside the layer. `seen` is None unless it is calibrated."""

    def settings(self) -> dict[str, Any]:
        """What it was told, for the card and to know an interrupted run again."""
        return {"method": type(self).__name__.lower(), **asdict(self)}
