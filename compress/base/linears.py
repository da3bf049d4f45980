"""The linears of a decoder layer by name. Knows no network: it imports neither torch nor transformers."""

from collections.abc import Mapping

READERS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.v_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
"""Norm or linear -> the linears that read its output."""
LINEARS = tuple(name for readers in READERS.values() for name in readers)
