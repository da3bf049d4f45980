"""The operations that layers are made of, chosen once for a device. Knows signatures, not how they are computed.

Their cut follows what a device can fuse: a norm goes into the product behind it, a residual addition into the product
before it. The plain implementation does one after the other.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.quantized_weights import Weight


@dataclass(frozen=True, slots=True)
class RopeTables:
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
        rotation: RopeTables,
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
        rotation: RopeTables,
        kv: Tensor,
        places: Tensor,
        heads: int,
        /,
    ) -> Tensor | None:
        """`norm_matmul` and `rope_and_store` at once -> the queries, or None where an implementation does not."""

    def attention(self, q: Tensor, kv: Tensor, plan: Any, scale: float, kv_scales: Tensor | None = None, /) -> Tensor:
        """Ragged attention over the pool; the plan is of this implementation's own kind."""
