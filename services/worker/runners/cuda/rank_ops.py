"""The operations of a tensor rank on a GPU: products whose inputs are shared are summed over the ranks. Knows no model.

The sum, the bias and the residual addition are one kernel after the product.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.linear import DeviceWeight
from kernels.operands import Activation
from services.worker.parallel.collectives import Collectives
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps


class TritonRankOps(TritonOps):
    """The Triton kernels on one of several ranks. Only the projections after attention and MLP add to the residual
    stream, and their inputs are what ranks share."""

    def __init__(self, others: Collectives) -> None:
        self._others = others

    def add_matmul(self, residual: Tensor, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, /) -> None:
        """residual += the sum of all ranks' x @ weight.T, + bias, which each rank has whole."""
        self._others.add_sum(residual, self.matmul(x, weight), bias)

    def add_experts(
        self, residual: Tensor, x: Tensor, routes: Any, activation: Activation, up: Any, down: Any, /
    ) -> None:
        """residual += the sum of all ranks' results; each rank has some neurons of every expert."""
        part = torch.zeros_like(residual)
        super().add_experts(part, x, routes, activation, up, down)
        self._others.add_sum(residual, part)


class InvariantTritonRankOps(TritonRankOps, InvariantTritonOps):
    """The same; a row has the same bits in any batch and any chunk."""
