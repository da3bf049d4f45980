"""The operations of an encoder in plain torch, on a CPU: packed texts, no padding. Knows no model."""

import torch
from torch import Tensor

from kernels.operands import Activation, Norm, Pooling
from kernels.plain_cpu import MklProduct, is_mkl_faster
from kernels.quantized_cpu import Product
from kernels.quantized_weights import Weight
from kernels.reference import texts as reference
from services.worker.models.encoders.ops import EmbeddingTables, PackedTexts
from services.worker.runners.cpu.ops import ReferenceOps


class CpuEncoderOps(ReferenceOps):
    """Plain torch. A row's last bits may depend on the other rows of its batch. The plan of attention are the texts in
    groups of equal lengths."""

    attend_packed = staticmethod(reference.attend_packed)

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Tensor | Product:
        """As a decoder's, but packed by MKL where that is faster for several rows: a text is seldom one row."""
        prepared = super().prepare(weight, dtype)
        return MklProduct(prepared) if isinstance(prepared, Tensor) and is_mkl_faster(prepared) else prepared

    def pool(self, x: Tensor, starts: Tensor, pooling: Pooling, /) -> Tensor:
        """One vector for each text. The mean of one text takes 6 us, its reduction in segments 20."""
        if pooling is Pooling.MEAN and len(starts) == 2:
            return x.float().mean(0, keepdim=True)
        return reference.pool_texts(x, starts, pooling)

    def embed(self, texts: PackedTexts, tables: EmbeddingTables, norm: Norm, /) -> Tensor:
        """norm(the sum of each token's rows)."""
        ids = texts.token_ids, texts.positions, texts.segments
        return reference.embed_texts(*ids, tables.tokens, tables.positions, tables.segments, norm)

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
