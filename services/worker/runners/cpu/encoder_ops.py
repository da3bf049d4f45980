"""The operations of an encoder in plain torch, on a CPU: packed texts, no padding. Knows no model."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operands import Activation, Norm
from kernels.quantized_cpu import Product
from services.worker.models.encoders.config import Pooling
from services.worker.models.encoders.ops import PackedTexts
from services.worker.runners.cpu.ops import ReferenceOps


class EqualTexts(NamedTuple):
    """Texts of equal lengths, which one call of attention computes."""

    begin: int
    """Their first token."""
    texts: int
    length: int


class CpuEncoderOps(ReferenceOps):
    """Plain torch. A row's last bits may depend on the other rows of its batch."""

    def matmul_activate(
        self, x: Tensor, activation: Activation, weight: Tensor | Product, bias: Tensor | None, /
    ) -> Tensor:
        """activation(x @ weight.T + bias)."""
        return self.activate(self.matmul(x, weight, bias), activation)

    def matmul_add_norm(
        self, x: Tensor, weight: Tensor | Product, bias: Tensor | None, residual: Tensor, norm: Norm, /
    ) -> Tensor:
        """norm(residual + x @ weight.T + bias)."""
        return self.normalize(residual.add_(self.matmul(x, weight, bias)), norm)

    def plan_packed(self, lengths: Sequence[int], /) -> list[EqualTexts]:
        """The texts in groups of equal lengths, which follow one another because lengths ascend: no copies."""
        plan, begin = [], 0
        for length, texts in groupby(lengths):
            count = len(list(texts))
            plan.append(EqualTexts(begin, count, length))
            begin += count * length
        return plan

    def attend_packed(self, qkv: Tensor, plan: Sequence[EqualTexts], heads: int, /) -> Tensor:
        """One call of attention for each group of equal lengths."""
        hidden = qkv.shape[1] // 3
        out = qkv.new_empty(qkv.shape[0], hidden)
        for begin, count, length in plan:
            rows = slice(begin, begin + count * length)
            q, k, v = qkv[rows].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v)
            out[rows].view(count, length, heads, -1).copy_(attended.transpose(1, 2))
        return out

    def pool(self, x: Tensor, texts: PackedTexts, pooling: Pooling, /) -> Tensor:
        """The vectors of the tokens [T, hidden] -> one for each text [B, hidden] in float32."""
        if pooling is Pooling.CLS:
            return x[texts.first].float()
        lengths = torch.tensor(texts.lengths)
        if pooling is Pooling.LAST:
            return x[texts.first + lengths - 1].float()
        return torch.segment_reduce(x.float(), pooling.value, lengths=lengths, axis=0)
