"""Attention over whole windows: compiled, transformers' own "sdpa" builds a mask, which bars the flash kernel.

Legend: B windows, T tokens of a window, H query heads, K kv heads, D head dimension.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

WHOLE_WINDOWS = "whole-windows"


def read_whole_windows(model: PreTrainedModel) -> None:
    """Set attention to plain causal (no mask tensor), unless the model has a sliding window."""
    if not getattr(model.config, "sliding_window", None):
        model.set_attn_implementation(WHOLE_WINDOWS)


def _attend(
    module: nn.Module, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    attended = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(WHOLE_WINDOWS, _attend)
AttentionMaskInterface.register(WHOLE_WINDOWS, lambda *_, **__: None)
