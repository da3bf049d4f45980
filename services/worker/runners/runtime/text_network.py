"""An encoder as a function from padded texts to hidden states or scores: what is exported.

Knows no jobs and no runtime. Legend: B texts of S tokens each, T = B * S, H heads, D head dimension.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.operands import Pooling
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.ops import PackedTexts
from services.worker.runners.cpu.encoder_ops import CpuEncoderOps
from services.worker.runners.runtime.network import DenseOps


class PaddedTexts(NamedTuple):
    """What attention needs to know of a batch."""

    texts: int
    """B."""
    length: int
    """S."""
    bias: Tensor
    """[B, 1, 1, S]: what is added to the scores of each token: 0, or a very negative number for padding."""


class TextNetwork(nn.Module):
    """An `Encoder` whose texts are padded behind their last tokens."""

    def __init__(self, encoder: Encoder) -> None:
        """The encoder's operations are `DenseTextOps`."""
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """All int64 [B, S]; attention_mask: 1 for tokens, 0 for padding; token_type_ids: where the model has segments.

        -> float32: hidden states [B, S, hidden], or the scores of a head's labels [B, labels].
        """
        model, (texts, length) = self.encoder, input_ids.shape
        places = torch.arange(length) + model.config.first_position
        # Not minus infinity: a runtime may compute 0 * inf where it fuses the mask.
        least = torch.finfo(model.embedding.dtype).min
        bias = torch.where(attention_mask > 0, 0.0, least).to(model.embedding.dtype)[:, None, None]
        packed = PackedTexts(
            token_ids=input_ids.flatten(),
            positions=places.expand(texts, length).flatten(),
            segments=None if token_type_ids is None else token_type_ids.flatten(),
            starts=torch.arange(texts + 1) * length,
            plan=PaddedTexts(texts, length, bias),
        )
        hidden = model.hidden(packed)
        if model.head is not None:
            return model.score(hidden, packed.starts)
        return hidden.reshape(texts, length, -1).float()


class DenseTextOps(DenseOps, CpuEncoderOps):
    """Plain torch over padded texts, in operations that exporters know. The plan of attention are `PaddedTexts`."""

    def attend_packed(self, qkv: Tensor, plan: PaddedTexts, heads: int, /) -> Tensor:  # type: ignore[override]
        """Attention of each text's tokens to all of its tokens but padding."""
        q, k, v = qkv.reshape(plan.texts, plan.length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, plan.bias)
        return attended.transpose(1, 2).reshape(plan.texts * plan.length, -1)

    def pool(self, x: Tensor, starts: Tensor, pooling: Pooling, /) -> Tensor:
        """The vector of each text's first token, which is all that a head reads."""
        assert pooling is Pooling.CLS, pooling
        return x[starts[:-1]].float()
