"""Gemma 2: norms around attention and MLP, capped scores and logits, every other layer with a window. Knows its
settings and tensor names."""

import math
from collections.abc import Sequence

from kernels.operands import Activation, NormKind
from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig, NormConfig
from services.worker.models.families.llama import FAMILY as LLAMA
from services.worker.models.family import Family, Part, PartNames, Split
from services.worker.models.raw_config import RawConfig
from services.worker.models.rope_settings import Rope, read_rope

_KINDS = ("sliding_attention", "full_attention")


def _read_config(raw: RawConfig) -> ModelConfig:
    head_dim, context_length = raw.integer("head_dim", 256), raw.integer("max_position_embeddings", 8192)
    return read_gemma_config(
        raw,
        head_dim,
        context_length,
        (read_rope(raw, context_length, head_dim), None),
        [_KINDS[layer % 2] for layer in range(raw.layers("num_hidden_layers"))],
        soft_caps=(50.0, 30.0),
    )


def read_gemma_config(
    raw: RawConfig,
    head_dim: int,
    context_length: int,
    ropes: tuple[Rope, Rope | None],
    kinds: Sequence[str],
    *,
    vocab_size: int = 256_000,
    qk_norm: bool = False,
    soft_caps: tuple[float | None, float | None] = (None, None),
) -> ModelConfig:
    """The settings of an architecture whose layer is Gemma's. Raises CheckpointError.

    ropes: of layers that see all tokens, and of those with a window. kinds: the layers' types where config.json does
    not list them. soft_caps: of scores and of logits, where it does not name them.
    """
    _refuse_the_unsupported(raw)
    hidden_size, layers = raw.integer("hidden_size"), raw.layers("num_hidden_layers")
    heads, kv_heads = raw.integer("num_attention_heads", 8), raw.integer("num_key_value_heads", 4)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    positions, local = ropes
    has_bias = raw.flag("attention_bias")
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.integer("vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm=NormConfig(NormKind.RMS, raw.number("rms_norm_eps", 1e-6), offset=1.0, after=True),
        activation=Activation.GATED_GELU_TANH,
        context_length=context_length,
        positions=positions,
        tied_embeddings=raw.flag("tie_word_embeddings", default=True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=False,
        qk_norm=qk_norm,
        windows=_read_windows(raw, kinds),
        local_rope=local,
        attention_scale=raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping", soft_caps[0]),
        logit_soft_cap=_soft_cap(raw, "final_logit_softcapping", soft_caps[1]),
        embedding_scale=math.sqrt(hidden_size),
    )


def _refuse_the_unsupported(raw: RawConfig) -> None:
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(f"hidden_activation {activation} is not supported; supported is gelu_pytorch_tanh")
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is not supported")


def _soft_cap(raw: RawConfig, name: str, default: float | None) -> float | None:
    """A positive number, or none if it is null in config.json."""
    value = raw.get(name, default)
    return None if value is None else RawConfig({name: value}).number(name)


def _read_windows(raw: RawConfig, default: Sequence[str]) -> tuple[int | None, ...]:
    kinds, layers = raw.get("layer_types") or list(default), len(default)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must name full_attention or sliding_attention {layers} times")
    window = raw.integer("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_LAYER = "model.layers.{layer}."
_NORMS = {
    Part.ATTENTION_NORM: "input_layernorm",
    Part.ATTENTION_AFTER_NORM: "post_attention_layernorm",
    Part.MLP_NORM: "pre_feedforward_layernorm",
    Part.MLP_AFTER_NORM: "post_feedforward_layernorm",
}
FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    read_config=_read_config,
    outside=LLAMA.outside,
    layer=(
        *(PartNames(part, Split.REPLICATED, (_LAYER + name,)) for part, name in _NORMS.items()),
        *(names for names in LLAMA.layer if names.part not in _NORMS),
    ),
    tensor_name=LLAMA.tensor_name,
)
