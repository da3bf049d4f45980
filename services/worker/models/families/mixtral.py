"""Mixtral and Qwen3-MoE: Llama's attention and a mixture of experts. Knows their settings and tensor names."""

from dataclasses import replace

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig, MoeConfig
from services.worker.models.families.llama import FAMILY as LLAMA
from services.worker.models.families.llama import Variant, read_llama_config, window_everywhere, window_unless_null
from services.worker.models.family import Family, Part, PartNames, Split
from services.worker.models.raw_config import RawConfig

_MOST_EXPERTS = 1 << 10


def _read_mixtral(raw: RawConfig) -> ModelConfig:
    config = read_llama_config(raw, Variant(window_everywhere, rope_theta=1e6))
    experts, chosen = raw.integer("num_local_experts", 8, _MOST_EXPERTS), raw.integer("num_experts_per_tok", 2)
    return _with_experts(config, MoeConfig(experts, chosen, config.intermediate_size, True, (True,) * config.layers))


def _read_qwen3(raw: RawConfig) -> ModelConfig:
    windows = window_unless_null if raw.flag("use_sliding_window") else Variant().windows
    config = read_llama_config(raw, Variant(windows, reads_attention_bias=True, qk_norm=True))
    moe = MoeConfig(
        raw.integer("num_experts", raw.integer("num_local_experts", 128, _MOST_EXPERTS), _MOST_EXPERTS),
        raw.integer("num_experts_per_tok", 8),
        raw.integer("moe_intermediate_size", 768),
        raw.flag("norm_topk_prob"),
        _sparse_layers(raw, config.layers),
    )
    return _with_experts(config, moe)


def _sparse_layers(raw: RawConfig, layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it."""
    step, dense = raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise CheckpointError("config.json: mlp_only_layers is not a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _with_experts(config: ModelConfig, moe: MoeConfig) -> ModelConfig:
    if moe.chosen > moe.experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {moe.chosen} exceeds the {moe.experts} experts")
    return replace(config, moe=moe)


def _mixtral_name(stored: str) -> str | None:
    """transformers calls the MLP `mlp` where it does not write the original names."""
    return LLAMA.tensor_name(stored.replace(".mlp.", ".block_sparse_moe."))


_MLP = "model.layers.{layer}.block_sparse_moe."
_QWEN_MLP = "model.layers.{layer}.mlp."
_ATTENTION = tuple(names for names in LLAMA.layer if names.part not in (Part.UP, Part.DOWN))
MIXTRAL = Family(
    architectures=("MixtralForCausalLM",),
    read_config=_read_mixtral,
    outside=LLAMA.outside,
    layer=(
        *_ATTENTION,
        PartNames(Part.ROUTER, Split.REPLICATED, (f"{_MLP}gate",)),
        PartNames(Part.EXPERT_UP, Split.COLUMN, tuple(_MLP + "experts.{expert}." + each for each in ("w1", "w3"))),
        PartNames(Part.EXPERT_DOWN, Split.ROW, (_MLP + "experts.{expert}.w2",)),
    ),
    tensor_name=_mixtral_name,
)
QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    read_config=_read_qwen3,
    outside=LLAMA.outside,
    layer=(
        *LLAMA.layer,
        PartNames(Part.ROUTER, Split.REPLICATED, (f"{_QWEN_MLP}gate",)),
        PartNames(
            Part.EXPERT_UP,
            Split.COLUMN,
            tuple(_QWEN_MLP + "experts.{expert}." + each for each in ("gate_proj", "up_proj")),
        ),
        PartNames(Part.EXPERT_DOWN, Split.ROW, (_QWEN_MLP + "experts.{expert}.down_proj",)),
    ),
    tensor_name=LLAMA.tensor_name,
)
