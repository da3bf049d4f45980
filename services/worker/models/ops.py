"""The operations that layers are made of, chosen once for a device. Knows signatures, not how they are computed.

They are cut where a device can fuse: a norm with the product behind it, a residual addition with the product before it.
The plain implementation does one after the other. T tokens, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.operands import Activation, Norm, Scores
from kernels.quantized_weights import Weight
from services.worker.models.lora import AdaptedProduct


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and sines of a step's T tokens; a model without rotation has ones and zeros."""

    cos: Tensor
    """[T, 1, D], or [positions, 1, D] with `positions`."""
    sin: Tensor
    """As cos, the first half negated."""
    positions: Tensor | None = None
    """int64 [T]: the row of cos and sin for each token; None: they have one row for each token, in order."""


class ExpertWeights(Protocol):
    """The weights of a layer's experts, all [outputs, inputs], in the form that an implementation multiplies with."""

    def allocate(self, expert: int, /) -> Tensor:
        """Memory for the plain weight of an expert."""

    def keep(self, expert: int, weight: Weight, /) -> Any:
        """Keep the weight of an expert, quantized or plain; any thread may call it -> its part, which has `nbytes`.

        Raises ValueError where its format cannot stand beside the other experts'."""


class Ops(Protocol):
    """One implementation of each operation. `kernels.reference` defines shapes and meaning."""

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Memory for the weight of a product, [outputs, inputs], in the order in which it is read fastest."""

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Any:
        """A weight, quantized or plain, in the order in which products with rows of `dtype` read it fastest."""

    def normalize(self, x: Tensor, norm: Norm, /) -> Tensor:
        """The norm over the last dimension."""

    def matmul(self, x: Tensor, weight: Any, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias; the weight is a tensor or what `prepare` returned."""

    def norm_matmul(self, x: Tensor, norm: Norm, weight: Any, bias: Tensor | None = None, /) -> Tensor:
        """norm(x) @ weight.T + bias; the weight is a tensor or what `prepare` returned."""

    def norm_activate(
        self, x: Tensor, norm: Norm, activation: Activation, weight: Any, bias: Tensor | None = None, /
    ) -> Tensor:
        """activation(norm(x) @ weight.T + bias), in the form that `add_matmul` of the same implementation takes."""

    def activate(self, x: Tensor, activation: Activation, /) -> Tensor:
        """The activation of x [T, m], in a form that `add_matmul` of the same implementation takes."""

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """Add x @ weight.T + bias to `residual` in place. adapters: what adds to the product; None: nothing does."""

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: RopeTables,
        kv: Tensor,
        slot_mapping: Tensor,
        heads: int,
        qk_norm: Norm | None,
        kv_scales: Tensor | None = None,
        /,
    ) -> Tensor:
        """Normalize queries and keys if there is a norm (RMS, weight [H + K, D]), rotate them, write keys and values to
        the pool, and return the queries [T, H, D]. kv_scales [2, K]: of an fp8 pool; None: all 1."""

    def norm_qkv(
        self,
        x: Tensor,
        norm: Norm,
        weight: Any,
        bias: Tensor | None,
        rope: RopeTables,
        kv: Tensor,
        slot_mapping: Tensor,
        heads: int,
        qk_norm: Norm | None,
        /,
    ) -> Tensor | None:
        """`norm_matmul` and `rope_and_store` in one kernel -> the queries, or None where there is no such kernel."""

    def expert_weights(self, count: int, outputs: int, inputs: int, dtype: torch.dtype, /) -> Any:
        """Empty `ExpertWeights` of this implementation."""

    def route(self, logits: Tensor, chosen: int, normalized: bool, own: range, /) -> Any:
        """Choose experts for each token from logits [T, experts]; the routes are of this implementation's own kind.
        own: the experts whose weights are here; routes to others add nothing."""

    def norm_route(
        self, x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool, own: range, /
    ) -> tuple[Tensor, Any]:
        """norm(x), and `route` by its product with the router [experts, hidden]."""

    def add_experts(
        self, residual: Tensor, x: Tensor, routes: Any, activation: Activation, up: Any, down: Any, /
    ) -> None:
        """Add the weighted results down(activation(up(x))) of each token's own experts to `residual` in place."""

    def attention(self, q: Tensor, kv: Tensor, plan: Any, scores: Scores, kv_scales: Tensor | None = None, /) -> Tensor:
        """Ragged attention over the pool; the plan is of this implementation's own kind."""
