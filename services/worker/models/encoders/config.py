"""The shape of an encoder as its engine needs it. Knows no file, no tensor and no family."""

from dataclasses import dataclass

from kernels.operands import Activation
from services.worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What turns the vector of the first token into scores: a projection, an activation, a projection to labels."""

    activation: str
    """tanh or relu."""
    labels: tuple[str, ...]
    multi_label: bool = False
    """Each label has a probability of its own; otherwise those of all labels add up to 1."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What the engine needs to know of an encoder before it sees a weight."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    norm_eps: float
    activation: Activation
    positions: int
    """Rows of the table of learned positions."""
    first_position: int = 0
    """The row of a text's first token."""
    segments: int = 0
    """Rows of the table of segments; 0: there is none."""
    embedding_size: int = 0
    """Width of the table of tokens, if it is projected to the hidden size; 0: it has that size."""
    groups: int = 0
    """How many layers have weights of their own, which an equal number of layers share; 0: each layer."""
    head: HeadConfig | None = None
    tied_embeddings: bool = False
    """An encoder has no head over the vocabulary."""

    @property
    def head_dim(self) -> int:
        """Dimensions of each head of attention."""
        return self.hidden_size // self.heads

    @property
    def context_length(self) -> int:
        """Most tokens of a text."""
        return self.positions - self.first_position

    @property
    def unique_layers(self) -> int:
        """Layers with weights of their own."""
        return self.groups or self.layers

    def weights_of(self, layer: int) -> int:
        """Which of the unique layers a layer is."""
        return layer * self.unique_layers // self.layers


@dataclass(frozen=True, slots=True)
class TextDecoderConfig:
    """A decoder that makes vectors of texts, or scores labels by them."""

    architecture: str
    decoder: ModelConfig
    head: HeadConfig | None = None
    """A projection of the last token's vector to labels."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's vector."""
        return self.decoder.hidden_size

    @property
    def context_length(self) -> int:
        """Most tokens of a text."""
        return self.decoder.context_length


TextModelConfig = EncoderConfig | TextDecoderConfig
