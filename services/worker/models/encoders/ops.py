"""The operations that an encoder needs beside those of a decoder. Knows signatures, not how they are computed.

T packed tokens, B texts one behind another without padding, H heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.operands import Activation, Norm, Pooling
from services.worker.models.ops import Ops


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """A batch: its texts one behind another."""

    token_ids: Tensor
    """int32 [T]."""
    positions: Tensor
    """int32 [T]: rows of the table of positions."""
    segments: Tensor | None
    """int32 [T]: 0, or 1 in the second part of a pair; None: all 0."""
    starts: Tensor
    """int32 [B + 1]: where each text begins, and the end of the last. None is empty; in a captured batch the texts
    behind the last one are."""
    plan: Any
    """What the operations' attention needs to know of the texts."""


@dataclass(frozen=True, slots=True)
class EmbeddingTables:
    """The tables whose rows an encoder adds for each token, all of one width."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor | None


class EncoderOps(Ops, Protocol):
    """One implementation of each operation."""

    def embed(self, texts: PackedTexts, tables: EmbeddingTables, norm: Norm, /) -> Tensor:
        """norm(the sum of each token's rows): [T, width]."""

    def matmul_activate(self, x: Tensor, activation: Activation, weight: Any, bias: Tensor | None, /) -> Tensor:
        """activation(x @ weight.T + bias)."""

    def matmul_add_norm(self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor, norm: Norm, /) -> Tensor:
        """norm(residual + x @ weight.T + bias); the residual may be overwritten."""

    def attend_packed(self, qkv: Tensor, plan: Any, heads: int, /) -> Tensor:
        """Attention of each text's tokens to all of its tokens: qkv [T, 3 * H * D] -> [T, H * D]."""

    def pool(self, x: Tensor, starts: Tensor, pooling: Pooling, /) -> Tensor:
        """The vectors of the tokens [T, hidden] -> one for each text [B, hidden] in float32."""
