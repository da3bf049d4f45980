"""Gemma 3, its text part: Gemma 2's layer with norms of queries and keys, and two rotations. Knows its settings."""

from dataclasses import replace

from services.worker.models.config import ModelConfig
from services.worker.models.families.gemma2 import FAMILY as GEMMA2
from services.worker.models.families.gemma2 import read_gemma_config
from services.worker.models.raw_config import RawConfig
from services.worker.models.rope_settings import Rope, read_rope

_GLOBAL_EVERY = 6
"""Layers, of which the last sees all tokens, in checkpoints that do not list their layers' types."""


def _read_config(raw: RawConfig) -> ModelConfig:
    head_dim, context_length = raw.integer("head_dim", 256), raw.integer("max_position_embeddings", 131_072)
    every, layers = raw.integer("sliding_window_pattern", _GLOBAL_EVERY), range(raw.layers("num_hidden_layers"))
    kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in layers]
    ropes = _read_ropes(raw, context_length, head_dim)
    return read_gemma_config(raw, head_dim, context_length, ropes, kinds, vocab_size=262_208, qk_norm=True)


def _read_ropes(raw: RawConfig, context_length: int, head_dim: int) -> tuple[Rope, Rope]:
    """The ropes of layers that see all tokens, and of those with a window."""
    by_type = raw.section("rope_parameters")  # of transformers 5
    full = by_type.section("full_attention").values or {"rope_theta": raw.get("rope_theta", 1e6)}
    local = by_type.section("sliding_attention").values or {"rope_theta": raw.get("rope_local_base_freq", 1e4)}
    scaled = RawConfig({"rope_parameters": {**full, **raw.section("rope_scaling").values}})
    return (
        read_rope(scaled, context_length, head_dim, 1e6),
        read_rope(RawConfig({"rope_parameters": local}), context_length, head_dim, 1e4),
    )


FAMILY = replace(GEMMA2, architectures=("Gemma3ForCausalLM",), read_config=_read_config)
