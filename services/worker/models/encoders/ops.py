"""The operations that an encoder needs beside those of a decoder. Knows signatures, not how they are computed.

T packed tokens, B texts one behind another without padding, H heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.operands import Activation, Norm
from services.worker.models.encoders.config import Pooling
from services.worker.models.ops import Ops


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """A batch: its texts one behind another, the shorter ones first."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: rows of the table of positions."""
    segments: Tensor | None
    """int64 [T]: 0, or 1 in the second part of a pair; None: all 0."""
    first: Tensor
    """int64 [B]: where each text begins."""
    lengths: Sequence[int]
    """Tokens of each text, none of which is empty."""
    plan: Any
    """What the operations' attention needs to know of the lengths."""


class EncoderOps(Ops, Protocol):
    """One implementation of each operation."""

    def matmul_activate(self, x: Tensor, activation: Activation, weight: Any, bias: Tensor | None, /) -> Tensor:
        """activation(x @ weight.T + bias)."""

    def matmul_add_norm(self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor, norm: Norm, /) -> Tensor:
        """norm(residual + x @ weight.T + bias); the residual may be overwritten."""

    def plan_packed(self, lengths: Sequence[int], /) -> Any:
        """What `attend_packed` needs to know of the texts' lengths, which ascend."""

    def attend_packed(self, qkv: Tensor, plan: Any, heads: int, /) -> Tensor:
        """Attention of each text's tokens to all of its tokens: qkv [T, 3 * H * D] -> [T, H * D]."""

    def pool(self, x: Tensor, texts: PackedTexts, pooling: Pooling, /) -> Tensor:
        """The vectors of the tokens [T, hidden] -> one for each text [B, hidden] in float32."""
