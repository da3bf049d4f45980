"""The operations that layers are made of, chosen once for a device. Knows signatures, not how they are computed.

Their cut follows what a device can fuse: a norm goes into the product behind it, a residual addition into the product
before it. The plain implementation does one after the other.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import quantized_cpu, reference
from kernels.quantized import Weight
from kernels.quantized_cpu import Product


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's T tokens."""

    cos: Tensor
    """[T, 1, D], or [positions, 1, D] with `positions`."""
    sin: Tensor
    """As cos, the first half negated."""
    positions: Tensor | None = None
    """int64 [T]: where a token's cosines and sines are; None: one line for each token."""


class Ops(Protocol):
    """One implementation of each operation. `kernels.reference` defines shapes and meaning."""

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Memory for the weight of a product, [outputs, inputs], in the order in which it is read fastest."""

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Any:
        """A weight, quantized or plain, in the order in which products with rows of `dtype` read it fastest."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Normalize the last dimension."""

    def norm_matmul(self, x: Tensor, norm: Tensor, eps: float, weight: Any, bias: Tensor | None = None, /) -> Tensor:
        """rms_norm(x) @ weight.T + bias; the weight is a tensor or what `prepare` made."""

    def norm_gate(self, x: Tensor, norm: Tensor, eps: float, weight: Any, bias: Tensor | None = None, /) -> Tensor:
        """silu(gate) * up, where gate and up are the halves of rms_norm(x) @ weight.T + bias."""

    def add_matmul(self, residual: Tensor, x: Tensor, weight: Any, bias: Tensor | None = None, /) -> None:
        """Add x @ weight.T + bias to `residual` in place."""

    def rope_and_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv: Tensor,
        places: Tensor,
        heads: int,
        norm: Tensor | None,
        eps: float,
        kv_scales: Tensor | None = None,
        /,
    ) -> Tensor:
        """Normalize queries and keys if there is a norm [H + K, D], rotate them, write keys and values to the pool, and
        return the queries. kv_scales [2, K]: of an fp8 pool; None: all 1."""

    def norm_qkv(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Any,
        bias: Tensor | None,
        rotation: Rotation,
        kv: Tensor,
        places: Tensor,
        heads: int,
        /,
    ) -> Tensor | None:
        """`norm_matmul` and `rope_and_store` at once -> the queries, or None where an implementation does not."""

    def attention(self, q: Tensor, kv: Tensor, plan: Any, scale: float, kv_scales: Tensor | None = None, /) -> Tensor:
        """Ragged attention over the pool; the plan is of this implementation's own kind."""


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
        rotation: Rotation,
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
