"""The shape of a model as the engine needs it. Knows no file, no tensor and no family."""

from dataclasses import dataclass

from kernels.operands import Activation, NormKind
from services.worker.models.rope_settings import Rope


@dataclass(frozen=True, slots=True)
class NormConfig:
    """The norms of a model; all of them are of one kind."""

    kind: NormKind
    eps: float
    has_bias: bool = False
    offset: float = 0.0
    """Added to the weights of a checkpoint; the sums are kept in float32."""
    after: bool = False
    """The outputs of attention and MLP are normalized, too, before they are added."""


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Positions are rows of a learned table, added to the embedding of the tokens."""

    count: int
    """Rows of the table."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The layers whose MLP is a mixture of experts."""

    experts: int
    """Experts of a layer."""
    chosen: int
    """Experts that compute a token."""
    width: int
    """Neurons of an expert."""
    normalized: bool
    """The weights of a token's chosen experts sum to 1; otherwise they are parts of the softmax over all experts."""
    layers: tuple[bool, ...]
    """For each layer, whether its MLP has experts."""
    own: range | None = None
    """The experts of a layer whose weights are here, on one of several ranks; None: all."""


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
    """Whether the projection after attention has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Each head's queries and keys are normalized (RMS)."""
    windows: tuple[int | None, ...]
    """For each layer, how many last tokens a query sees; None is all."""
    eos_token_ids: tuple[int, ...] = ()
    local_rope: Rope | None = None
    """Positions in layers with a window; None: those of the other layers."""
    attention_scale: float | None = None
    """Factor of the scores of attention; None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Soft cap of the scores of attention, as in `kernels.operands.Scores`; None: no cap."""
    logit_soft_cap: float | None = None
    """Soft cap of the logits; None: no cap."""
    embedding_scale: float = 1.0
    """Factor of the embedding of tokens, rounded to the model's dtype."""
    moe: MoeConfig | None = None
    """None: the MLP of each layer is one of `intermediate_size` neurons."""
    mask_token: int | None = None
    """Stands for a token that is not known yet, of a model that guesses several tokens in one pass; None: it guesses
    one."""
    kv_dtype: str = "auto"
    """The format of stored keys and values for which the checkpoint was calibrated (fp8, int8); auto: none."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    @property
    def has_plain_scores(self) -> bool:
        """Whether the scores of attention are the scaled products of queries and keys alone."""
        return self.attention_soft_cap is None

    @property
    def active_neurons(self) -> int:
        """The most neurons that compute a token in a layer's MLP."""
        if self.moe is None:
            return self.intermediate_size
        sparse = self.moe.chosen * self.moe.width
        return sparse if all(self.moe.layers) else max(sparse, self.intermediate_size)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]

    @property
    def up_outputs(self) -> int:
        """Outputs of the MLP's first projection: gate and up are one product."""
        return self.intermediate_size * (2 if self.activation.is_gated else 1)


def count_parameters(config: ModelConfig) -> int:
    """Numbers that a model of this configuration has."""
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    norm = config.hidden_size * (1 + config.norm.has_bias)
    layer = config.hidden_size * heads + 2 * norm
    layer += config.norm.after * 2 * norm
    layer += config.qkv_bias * (config.heads + 2 * config.kv_heads) * config.head_dim
    layer += config.output_bias * config.hidden_size
    layer += config.qk_norm * 2 * config.head_dim
    dense = config.hidden_size * (config.up_outputs + config.intermediate_size)
    dense += config.mlp_bias * (config.up_outputs + config.hidden_size)
    sparse, moe = 0, config.moe
    if moe is not None:
        sparse = moe.experts * config.hidden_size * (moe.width * (2 + config.activation.is_gated) + 1)
    mlps = sum(sparse if config.has_experts(index) else dense for index in range(config.layers))
    return config.layers * layer + mlps + count_embeddings(config) + norm


def count_embeddings(config: ModelConfig) -> int:
    """Numbers in the embeddings, of tokens and of learned positions, and in the head: those that are never rounded."""
    rows = config.vocab_size * (1 if config.tied_embeddings else 2)
    if isinstance(config.positions, LearnedPositions):
        rows += config.positions.count
    return rows * config.hidden_size
