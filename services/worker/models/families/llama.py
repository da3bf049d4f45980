"""Llama and the architectures of its shape: Mistral, Qwen2 and Qwen3. Knows their settings and tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kernels.operands import Activation, NormKind
from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig, NormConfig
from services.worker.models.family import Family, Part, PartNames, Split
from services.worker.models.raw_config import RawConfig
from services.worker.models.rope_settings import read_rope

Windows = tuple[int | None, ...]
_WINDOW = 4096
"""Tokens of a window that config.json does not name, in transformers."""


def _no_windows(raw: RawConfig, layers: int) -> Windows:
    return (None,) * layers


def _read_window(raw: RawConfig, default: int | None) -> int | None:
    """`sliding_window`; null: none. default: where config.json does not name it, as in transformers."""
    if "sliding_window" not in raw.values:
        return default
    return None if raw.get("sliding_window") is None else raw.integer("sliding_window")


def window_everywhere(raw: RawConfig, layers: int) -> Windows:
    """`sliding_window` in each layer."""
    return (_read_window(raw, None),) * layers


def window_unless_null(raw: RawConfig, layers: int) -> Windows:
    """`sliding_window` in each layer, also where config.json does not name it."""
    return (_read_window(raw, _WINDOW),) * layers


def _windows_by_layer(raw: RawConfig, layers: int) -> Windows:
    window = _read_window(raw, _WINDOW) if raw.flag("use_sliding_window") else None
    if window is None:
        return (None,) * layers
    # transformers' own default is 28; a 0 means that all layers have windows.
    first = 0 if raw.get("max_window_layers") == 0 else raw.integer("max_window_layers", 28)
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = raw.get("layer_types") or default
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must name full_attention or sliding_attention {layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, slots=True)
class Variant:
    """Where an architecture of this family has more than the others."""

    windows: Callable[[RawConfig, int], Windows] = _no_windows
    reads_attention_bias: bool = False
    """`attention_bias` gives biases to all projections of attention."""
    reads_mlp_bias: bool = False
    qkv_bias: bool = False
    """Queries, keys and values have biases, whatever is in config.json."""
    qk_norm: bool = False
    rope_theta: float = 10000.0
    """Where config.json names none."""


_VARIANTS: Mapping[str, Variant] = {
    "LlamaForCausalLM": Variant(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Variant(window_unless_null),
    "Qwen2ForCausalLM": Variant(_windows_by_layer, qkv_bias=True),
    "Qwen3ForCausalLM": Variant(_windows_by_layer, reads_attention_bias=True, qk_norm=True),
}


def _read_config(raw: RawConfig) -> ModelConfig:
    return read_llama_config(raw, _VARIANTS[raw.architecture])


def read_llama_config(raw: RawConfig, variant: Variant) -> ModelConfig:
    """The settings of an architecture whose layer is Llama's. Raises CheckpointError."""
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw.get('hidden_act')} is not supported; supported is silu")
    heads, hidden_size, layers = (
        raw.integer("num_attention_heads"), raw.integer("hidden_size"), raw.layers("num_hidden_layers")
    )  # fmt: skip
    kv_heads = raw.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    attention_bias = variant.reads_attention_bias and raw.flag("attention_bias")
    context_length = raw.integer("max_position_embeddings")
    head_dim = raw.integer("head_dim", hidden_size // heads)
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm=NormConfig(NormKind.RMS, raw.number("rms_norm_eps")),
        activation=Activation.GATED_SILU,
        context_length=context_length,
        positions=read_rope(raw, context_length, head_dim, variant.rope_theta),
        tied_embeddings=raw.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or variant.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=variant.reads_mlp_bias and raw.flag("mlp_bias"),
        qk_norm=variant.qk_norm,
        windows=variant.windows(raw, layers),
    )


def tensor_name(stored: str) -> str | None:
    """The name as it is. Old checkpoints store the frequencies of the rotation, which follow from config.json."""
    return None if stored.endswith("rotary_emb.inv_freq") else stored


_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
FAMILY = Family(
    architectures=tuple(_VARIANTS),
    read_config=_read_config,
    outside=(
        PartNames(Part.EMBEDDING, Split.COLUMN, ("model.embed_tokens",)),
        PartNames(Part.FINAL_NORM, Split.REPLICATED, ("model.norm",)),
        PartNames(Part.HEAD, Split.COLUMN, ("lm_head",)),
    ),
    layer=(
        PartNames(Part.ATTENTION_NORM, Split.REPLICATED, (f"{_LAYER}input_layernorm",)),
        PartNames(Part.QKV, Split.COLUMN, tuple(f"{_ATTENTION}{each}_proj" for each in "qkv")),
        PartNames(Part.Q_NORM, Split.REPLICATED, (f"{_ATTENTION}q_norm",)),
        PartNames(Part.K_NORM, Split.REPLICATED, (f"{_ATTENTION}k_norm",)),
        PartNames(Part.OUTPUT, Split.ROW, (f"{_ATTENTION}o_proj",)),
        PartNames(Part.MLP_NORM, Split.REPLICATED, (f"{_LAYER}post_attention_layernorm",)),
        PartNames(Part.UP, Split.COLUMN, (f"{_MLP}gate_proj", f"{_MLP}up_proj")),
        PartNames(Part.DOWN, Split.ROW, (f"{_MLP}down_proj",)),
    ),
    tensor_name=tensor_name,
)
