"""The operations in plain torch, on a CPU. Knows no model."""

import torch
from torch import Tensor

from kernels import quantized_cpu, reference
from kernels.quantized_cpu import Product
from kernels.quantized_weights import Weight
from services.worker.models.ops import RopeTables


class ReferenceOps:
    """Plain torch, as fast as it goes."""

    _dense = staticmethod(reference.matmul)
    rms_norm = staticmethod(reference.rms_norm)
    attention = staticmethod(reference.attention)
    plan_attention = staticmethod(reference.plan_attention)

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Column after column: few rows stream through it 1.2 to 2.5 times as fast as through rows."""
        return torch.empty(inputs, outputs, dtype=dtype).t()

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Tensor | Product:
        """As `quantized_cpu` says; plain tensors column after column."""
        prepared = quantized_cpu.prepare(weight, dtype)
        if not isinstance(prepared, Tensor):
            return prepared
        outputs, inputs = prepared.shape
        return self.empty_weight(outputs, inputs, dtype).copy_(prepared)

    def _matmul(self, x: Tensor, weight: Tensor | Product, bias: Tensor | None) -> Tensor:
        return self._dense(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)

    def norm_matmul(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor | Product, bias: Tensor | None = None, /
    ) -> Tensor:
        """rms_norm(x) @ weight.T + bias."""
        return self._matmul(self.rms_norm(x, norm, eps), weight, bias)

    def norm_gate(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor | Product, bias: Tensor | None = None, /
    ) -> Tensor:
        """The gate of the MLP, from the residual stream."""
        return reference.silu_and_mul(self.norm_matmul(x, norm, eps, weight, bias))

    def add_matmul(self, residual: Tensor, x: Tensor, weight: Tensor | Product, bias: Tensor | None = None, /) -> None:
        """residual += x @ weight.T + bias."""
        residual.add_(self._matmul(x, weight, bias))

    def rope_and_store(
        self,
        qkv: Tensor,
        rotation: RopeTables,
        kv: Tensor,
        places: Tensor,
        heads: int,
        norm: Tensor | None,
        eps: float,
        kv_scales: Tensor | None = None,
        /,
    ) -> Tensor:
        """Norm, rotation and the write to the pool."""
        kv_heads = kv.shape[3]
        if norm is not None:
            rotated = heads + kv_heads
            qkv[:, :rotated] = self.rms_norm(qkv[:, :rotated], norm, eps)
        cos, sin = rotation.cos, rotation.sin
        if rotation.positions is not None:
            cos, sin = cos[rotation.positions], sin[rotation.positions]
        return reference.rope_and_store(qkv, cos, sin, kv, places, heads, kv_heads, kv_scales)

    def norm_qkv(self, *_: object) -> None:
        """Not at once."""


class InvariantOps(ReferenceOps):
    """Plain torch; a row has the same bits in any batch and any chunk."""

    _dense = staticmethod(reference.matmul_invariant)
    attention = staticmethod(reference.attention_invariant)
    plan_attention = staticmethod(reference.plan_attention_invariant)
