"""The shape of a model as the engine needs it. Knows no file, no tensor and no family."""

from dataclasses import dataclass

from kernels.operands import Activation, NormKind


@dataclass(frozen=True, slots=True)
class NormConfig:
    """The norms of a model; all of them are of one kind."""

    kind: NormKind
    eps: float
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Positions rotate queries and keys (Su et al. 2021)."""

    theta: float
    kind: str = "default"
    """default, linear or llama3."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    """Context that the model was first trained for (llama3)."""


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Positions are rows of a learned table, added to the embedding of the tokens."""

    count: int
    """Rows of the table."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine needs to know of a decoder before it sees a weight."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: NormConfig
    activation: Activation
    context_length: int
    positions: Rope | LearnedPositions
    tied_embeddings: bool
    """The head is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """Of the projection after attention."""
    mlp_bias: bool
    qk_norm: bool
    """Each head's queries and keys are normalized (RMS)."""
    windows: tuple[int | None, ...]
    """For each layer, how many last tokens a query sees; None is all."""
    eos_token_ids: tuple[int, ...] = ()
    kv_dtype: str = "auto"
    """Of stored keys and values, if the checkpoint was calibrated for one: fp8 or int8."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    @property
    def up_outputs(self) -> int:
        """Outputs of the MLP's first projection: gate and up are one product."""
        return self.intermediate_size * (2 if self.activation.is_gated else 1)


def count_parameters(config: ModelConfig) -> int:
    """Numbers that a model of this configuration has."""
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    norm = config.hidden_size * (1 + config.norm.has_bias)
    layer = config.hidden_size * (heads + config.up_outputs + config.intermediate_size) + 2 * norm
    layer += config.qkv_bias * (config.heads + 2 * config.kv_heads) * config.head_dim
    layer += config.output_bias * config.hidden_size
    layer += config.mlp_bias * (config.up_outputs + config.hidden_size)
    layer += config.qk_norm * 2 * config.head_dim
    return config.layers * layer + count_embeddings(config) + norm


def count_embeddings(config: ModelConfig) -> int:
    """Numbers in the embeddings, of tokens and of learned positions, and in the head: those that are never rounded."""
    rows = config.vocab_size * (1 if config.tied_embeddings else 2)
    if isinstance(config.positions, LearnedPositions):
        rows += config.positions.count
    return rows * config.hidden_size
