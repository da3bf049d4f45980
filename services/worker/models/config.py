"""The shape of a model as the engine needs it. Knows no file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys."""

    theta: float
    kind: str = "default"
    """default, linear or llama3."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    """Context that the model was first trained for (llama3)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine needs to know of a model before it sees a weight."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Of the projection after attention."""
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """For each layer, how many last tokens a query sees; None is all."""
    eos_token_ids: tuple[int, ...]
    kv_dtype: str = "auto"
    """Of stored keys and values, if the checkpoint was calibrated for one: fp8 or int8."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def count_parameters(config: ModelConfig) -> int:
    """Numbers that a model of this configuration has."""
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size + 2)
    layer += config.qkv_bias * (config.heads + 2 * config.kv_heads) * config.head_dim
    layer += config.output_bias * config.hidden_size
    layer += config.mlp_bias * (2 * config.intermediate_size + config.hidden_size)
    layer += config.qk_norm * 2 * config.head_dim
    return config.layers * layer + count_embeddings(config) + config.hidden_size


def count_embeddings(config: ModelConfig) -> int:
    """Numbers of them in the embedding and the head."""
    return config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
