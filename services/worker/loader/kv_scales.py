"""Reads the scales of stored keys and values that a checkpoint may have. Knows their names and shapes, no weights.

Only a pool in fp8 uses them: a stored number x stands for x times the scale of its head.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.loader.tensors import Checkpoint
from services.worker.models.decoder_layer import DecoderLayer
from services.worker.parallel.shards import Span

# Names by llm-compressor and compressed-tensors, by AutoFP8, and by earlier versions of both. kv_scale is for both.
_NAME = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,3})\.self_attn\."
    r"(q_scale|kv_scale|attn\.q_scale|(attn\.|[kv]_proj\.)?[kv]_scale|[qkv]_proj\.output_scale)"
)


def is_scale(name: str, layers: int) -> bool:
    """Whether this is the name of a scale of queries, keys or values, in one of the first `layers` layers."""
    found = _NAME.fullmatch(name)
    return found is not None and int(found[1]) < layers


def own_scale(name: str, elements: int, layers: Span, kv_heads: Span, ranks: int) -> tuple[str, Span | None] | None:
    """The name that a scale has in the model of a rank with these layers and heads, and which of its numbers are the
    rank's (None: all); None: it is no scale of these layers."""
    found = _NAME.fullmatch(name)
    if found is None or not layers.start <= int(found[1]) < layers.stop:
        return None
    own = f"{name[: found.start(1)]}{int(found[1]) - layers.start}{name[found.end(1) :]}"
    return own, kv_heads if elements > 1 and ranks > 1 else None


def load_kv_scales(layers: Sequence[DecoderLayer], checkpoint: Checkpoint) -> None:
    """Set each layer's scales, float32 [2, K], where the checkpoint has any. Raises CheckpointError."""
    with checkpoint.opened() as read:
        for index, layer in enumerate(layers):
            attention, prefix = layer.attention, f"model.layers.{index}.self_attn."
            names = [_name(checkpoint, prefix, kind) for kind in "kv"]
            if any(names):
                scales = [_checked(name, read(name), attention.kv_heads) if name else None for name in names]
                ones = torch.ones(attention.kv_heads)
                both = torch.stack([ones if scale is None else scale for scale in scales])
                attention.kv_scales = both.to(attention.norm.weight.device)


def _name(checkpoint: Checkpoint, prefix: str, kind: str) -> str:
    """The name of the scale of keys ("k") or values ("v"); empty if there is none."""
    names = (
        f"{kind}_scale",
        f"attn.{kind}_scale",
        f"{kind}_proj.{kind}_scale",
        f"{kind}_proj.output_scale",
        "kv_scale",
    )
    return next((prefix + name for name in names if prefix + name in checkpoint.headers), "")


def _checked(name: str, scale: Tensor, kv_heads: int) -> Tensor:
    """float32 [K]."""
    scale = scale.float().flatten()
    if scale.numel() not in (1, kv_heads):
        raise CheckpointError(f"tensor {name} has {scale.numel()} scales for {kv_heads} key/value heads")
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise CheckpointError(f"tensor {name} holds scales that are not positive numbers")
    return scale.expand(kv_heads)
