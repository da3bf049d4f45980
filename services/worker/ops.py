"""The operations that layers are made of, chosen once for a device. Knows signatures, not how they are computed."""

from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import AttentionPlan, IntArray


class Ops(Protocol):
    """One implementation of each operation. `kernels.reference` defines shapes and meaning."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Normalize the last dimension."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Add in place, then normalize."""

    def silu_and_mul(self, gate_up: Tensor, /) -> Tensor:
        """The gate of the MLP."""

    def rope_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, places: Tensor, heads: int, kv_heads: int, /
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to the pool, return the queries."""

    def attention(self, q: Tensor, kv: Tensor, plan: AttentionPlan, scale: float, /) -> Tensor:
        """Ragged attention over the pool."""

    def plan_attention(
        self,
        lengths: IntArray,
        contexts: IntArray,
        tables: IntArray,
        block_size: int,
        window: int | None,
        dtype: torch.dtype,
        /,
    ) -> AttentionPlan:
        """What all layers of a step with this window need to know of its rows."""


class ReferenceOps:
    """Plain torch, as fast as it goes."""

    matmul = staticmethod(reference.matmul)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    rope_and_store = staticmethod(reference.rope_and_store)
    attention = staticmethod(reference.attention)
    plan_attention = staticmethod(reference.plan_attention)


class InvariantOps(ReferenceOps):
    """Plain torch; a row has the same bits in any batch and any chunk."""

    matmul = staticmethod(reference.matmul_invariant)
    attention = staticmethod(reference.attention_invariant)
    plan_attention = staticmethod(reference.plan_attention_invariant)
