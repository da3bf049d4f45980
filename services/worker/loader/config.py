"""The shape of a model, read from a checkpoint's config.json. Knows the four architectures, never their weights."""

from pathlib import Path
from typing import Any, TypeVar

from services.worker.errors import CheckpointError
from services.worker.loader.files import _read_json
from services.worker.models.config import ModelConfig, Rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_Number = TypeVar("_Number", int, float)
_LARGEST = 1 << 53
_MOST_LAYERS = 1 << 10


def load_config(model_dir: Path) -> ModelConfig:
    """Read config.json (and the end tokens of generation_config.json). Raises CheckpointError."""
    raw = _read_json(model_dir / "config.json")
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "none"
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    _refuse_the_unsupported(raw)
    heads = _number(raw, "num_attention_heads", int)
    hidden_size = _number(raw, "hidden_size", int)
    layers = _number(raw, "num_hidden_layers", int, most=_MOST_LAYERS)
    kv_heads = _number(raw, "num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    family = architecture.removesuffix("ForCausalLM")
    attention_bias = family in ("Llama", "Qwen3") and _flag(raw, "attention_bias")
    context_length = _number(raw, "max_position_embeddings", int)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_number(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_number(raw, "intermediate_size", int),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_number(raw, "head_dim", int, hidden_size // heads),
        norm_eps=_number(raw, "rms_norm_eps", float),
        context_length=context_length,
        rope=_read_rope(raw, context_length),
        tied_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=attention_bias or family == "Qwen2",
        output_bias=attention_bias,
        mlp_bias=family == "Llama" and _flag(raw, "mlp_bias"),
        qk_norm=family == "Qwen3",
        windows=_read_windows(raw, family, layers),
        eos_token_ids=_read_eos(raw, model_dir),
        kv_dtype=_read_kv_dtype(raw),
    )


def read_quantization(model_dir: Path) -> dict[str, Any] | None:
    """The quantization_config of config.json; None: the weights are plain. Raises CheckpointError."""
    return _object(_read_json(model_dir / "config.json"), "quantization_config") or None


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """A setting that has settings of its own; empty where it is absent."""
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} is not an object")
    return value or {}


def _number(
    raw: dict[str, Any], name: str, kind: type[_Number], default: _Number | None = None, most: int = _LARGEST
) -> _Number:
    value: Any = raw.get(name) or default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= most or kind(value) != value:
        whole = "whole " if kind is int else ""
        raise CheckpointError(f"config.json: {name} must be a positive {whole}number of at most {most:,}")
    return kind(value)


def _flag(raw: dict[str, Any], name: str) -> bool:
    """Whether something is so; absent: it is not."""
    value = raw.get(name)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"config.json: {name} must be true or false")
    return bool(value)


def _refuse_the_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw['hidden_act']} is not supported; supported is silu")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor is not supported")


def _read_kv_dtype(raw: dict[str, Any]) -> str:
    """`kv_cache_scheme`: of compressed-tensors 8 bits, float or int; of AutoFP8 the word static, for FP8."""
    settings = _object(raw, "quantization_config")
    if settings.get("kv_cache_scheme") == "static":
        return "fp8"
    scheme = _object(settings, "kv_cache_scheme")
    if not scheme:
        return "auto"
    kind, bits = scheme.get("type", "int"), scheme.get("num_bits", 8)
    if bits != 8 or kind not in ("float", "int"):
        raise CheckpointError(
            f"kv_cache_scheme of {bits} bits ({kind}) is not supported; supported are 8, float or int"
        )
    return "fp8" if kind == "float" else "int8"


def _read_rope(raw: dict[str, Any], context_length: int) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    old = {"rope_theta": raw.get("rope_theta", 10000.0), **_object(raw, "rope_scaling")}
    settings = _object(raw, "rope_parameters") or old
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope scaling {kind} is not supported; supported are default, linear and llama3")
    stretched, llama3 = kind != "default", kind == "llama3"
    return Rope(
        theta=_number(settings, "rope_theta", float),
        kind=kind,
        factor=_number(settings, "factor", float) if stretched else 1.0,
        low_freq_factor=_number(settings, "low_freq_factor", float) if llama3 else 1.0,
        high_freq_factor=_number(settings, "high_freq_factor", float) if llama3 else 4.0,
        original_context=_number(settings, "original_max_position_embeddings", int, context_length),
    )


def _read_windows(raw: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    slides = family == "Mistral" or (family.startswith("Qwen") and _flag(raw, "use_sliding_window"))
    if not slides or raw.get("sliding_window") is None:
        return (None,) * layers
    window = _number(raw, "sliding_window", int)
    if family == "Mistral":
        return (window,) * layers
    # transformers' own default is 28; a 0 is no number of layers, and yet means all.
    first = 0 if raw.get("max_window_layers") == 0 else _number(raw, "max_window_layers", int, 28)
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = raw.get("layer_types") or default
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must name full_attention or sliding_attention {layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_eos(raw: dict[str, Any], model_dir: Path) -> tuple[int, ...]:
    """The end tokens that the checkpoint's generation settings name, else those of the model's."""
    path = model_dir / "generation_config.json"
    settings = _read_json(path) if path.exists() else {}
    eos = settings.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
        raise CheckpointError("eos_token_id is neither a token nor a list of tokens")
    return tuple(tokens)
