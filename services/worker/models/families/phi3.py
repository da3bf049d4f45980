"""Phi-3, Phi-3.5 and the Phi-4 of their shape: Llama's layer with fused projections. Knows their settings and tensor
names."""

from services.worker.models.config import ModelConfig
from services.worker.models.families.llama import Variant, read_llama_config, tensor_name, window_everywhere
from services.worker.models.family import Family, Part, PartNames, Split
from services.worker.models.raw_config import RawConfig


def _read_config(raw: RawConfig) -> ModelConfig:
    return read_llama_config(raw, Variant(window_everywhere))


_LAYER = "model.layers.{layer}."
FAMILY = Family(
    architectures=("Phi3ForCausalLM",),
    read_config=_read_config,
    outside=(
        PartNames(Part.EMBEDDING, Split.COLUMN, ("model.embed_tokens",)),
        PartNames(Part.FINAL_NORM, Split.REPLICATED, ("model.norm",)),
        PartNames(Part.HEAD, Split.COLUMN, ("lm_head",)),
    ),
    layer=(
        PartNames(Part.ATTENTION_NORM, Split.REPLICATED, (f"{_LAYER}input_layernorm",)),
        PartNames(Part.QKV, Split.COLUMN, (f"{_LAYER}self_attn.qkv_proj",)),
        PartNames(Part.OUTPUT, Split.ROW, (f"{_LAYER}self_attn.o_proj",)),
        PartNames(Part.MLP_NORM, Split.REPLICATED, (f"{_LAYER}post_attention_layernorm",)),
        PartNames(Part.UP, Split.COLUMN, (f"{_LAYER}mlp.gate_up_proj",)),
        PartNames(Part.DOWN, Split.ROW, (f"{_LAYER}mlp.down_proj",)),
    ),
    tensor_name=tensor_name,
)
