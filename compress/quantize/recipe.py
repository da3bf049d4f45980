"""The interface of a quantization method: what it needs, how it rounds one layer, how its weights are stored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from compress.base.network import LayerStats
from compress.quantize.layout import Scheme
from kernels.quantized_weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded layer."""

    weights: Mapping[str, QuantizedWeight]
    """Linear name -> weight."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Other tensors to store with the layer."""


@dataclass(frozen=True, slots=True)
class Recipe(ABC):
    """One method; its fields are its settings."""

    @property
    @abstractmethod
    def calibrated(self) -> bool:
        """Whether it needs calibration text."""

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """The stored layout of its linears."""

    @abstractmethod
    def round(self, layer: nn.Module, seen: LayerStats | None, /) -> Rounded:
        """Round a layer's linears; it may fold factors within the layer. `seen` is None unless it is calibrated."""

    def settings(self) -> dict[str, Any]:
        """The settings, for the model card and to recognize an interrupted run."""
        return {"method": type(self).__name__.lower(), **asdict(self)}
