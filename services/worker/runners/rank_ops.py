"""The operations of a tensor rank: products whose inputs are shared are summed over the ranks. Knows no model."""

from typing import Any

import torch
from torch import Tensor

from kernels.operands import Activation
from kernels.quantized_cpu import Int8Product
from services.worker.models.lora import AdaptedProduct
from services.worker.parallel.collectives import Collectives
from services.worker.runners.cpu.ops import InvariantOps, ReferenceOps


class RankOps(ReferenceOps):
    """Plain torch on one of several ranks. Only the projections after attention and MLP add to the residual stream, and
    their inputs are what ranks share."""

    def __init__(self, others: Collectives) -> None:
        self._others = others

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """residual += the sum of all ranks' x @ weight.T and of what adapters add to it, + bias, which each rank has
        whole."""
        if isinstance(weight, Int8Product):  # All parts of a row are rounded by one scale, as the whole row would be.
            part = weight(x, None, self._others.largest(x.float().abs().amax(1, keepdim=True)))
        else:
            part = torch.zeros_like(residual)
            super().add_matmul(part, x, weight)
        if adapters is not None:
            adapters.add(part, x)
        self._others.add_sum(residual, part, bias)

    def add_experts(
        self, residual: Tensor, x: Tensor, routes: Any, activation: Activation, up: Any, down: Any, /
    ) -> None:
        """residual += the sum of all ranks' results; each rank has some neurons of every expert, or some experts."""
        part = torch.zeros_like(residual)
        super().add_experts(part, x, routes, activation, up, down)
        self._others.add_sum(residual, part)


class InvariantRankOps(RankOps, InvariantOps):
    """The same; a row has the same bits in any batch and any chunk."""
