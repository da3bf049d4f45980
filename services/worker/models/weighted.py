"""A network as the loader sees it: names of a checkpoint's tensors, and the weights that they fill. Knows no file."""

from typing import Protocol

from torch import Tensor

from services.worker.models.decoder import Projection


class WeightedConfig(Protocol):
    """What the loader reads of a network's configuration."""

    @property
    def architecture(self) -> str:
        """As config.json names it."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def tied_embeddings(self) -> bool:
        """A checkpoint may have a head that is not read: it is the embedding."""


class TensorNames(Protocol):
    """What the loader asks of a family."""

    def tensor_name(self, stored: str, /) -> str | None:
        """The name of a checkpoint's tensor in the network's tables; None: it holds no weights."""


class WeightedModel(Protocol):
    """A decoder or an encoder."""

    @property
    def config(self) -> WeightedConfig:
        """Its shape."""

    @property
    def family(self) -> TensorNames:
        """Its family."""

    @property
    def embedding(self) -> Tensor:
        """The table of tokens: of the network's device and dtype."""

    def projections(self) -> list[Projection]:
        """The products with weights of their own."""

    def destinations(self) -> dict[str, list[Tensor]]:
        """For each tensor name of a checkpoint, the views of the weights that it fills."""
