"""The operations of a tensor rank on a GPU: products whose inputs are shared are summed over the ranks. Knows no model.

The norm that follows the sum of few rows is a part of its kernel.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import linear
from kernels.linear import DeviceWeight
from kernels.operands import Activation, Norm
from services.worker.models.lora import AdaptedProduct
from services.worker.models.ops import RopeTables
from services.worker.parallel.gpu_collectives import GpuCollectives
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps


class SummedOps(TritonOps):
    """The Triton kernels on one of several ranks. Only the projections after attention and MLP add to the residual
    stream, and their inputs are what ranks share."""

    waits_for_ranks = True

    def __init__(self, others: GpuCollectives) -> None:
        self._others = others

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: DeviceWeight,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """residual += the sum of all ranks' x @ weight.T and of what adapters add to it, + bias, which each rank has
        whole."""
        self._others.add_sum(residual, self._part(x, weight, adapters), bias)

    def _part(self, x: Tensor, weight: DeviceWeight, adapters: AdaptedProduct | None) -> Tensor:
        """This rank's part of a sum: x @ weight.T, and what adapters add to it."""
        if adapters is None:
            return self.matmul(x, weight)
        part = adapters.linear(x, weight, None)
        if part is None:
            part = self.matmul(x, weight)
            adapters.add(part, x)
        return part

    def add_experts(
        self, residual: Tensor, x: Tensor, routes: Any, activation: Activation, up: Any, down: Any, /
    ) -> None:
        """residual += the sum of all ranks' results; each rank has some neurons of every expert, or some experts."""
        part = torch.zeros_like(residual)
        super().add_experts(part, x, routes, activation, up, down)
        self._others.add_sum(residual, part)


class TritonRankOps(SummedOps):
    """The same; a sum of few rows and the norm that follows are one kernel."""

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: DeviceWeight,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """As `SummedOps.add_matmul`; complete when a norm of the residual stream is taken, or when the collectives
        settle."""
        part = linear.parts(x, weight) if adapters is None and self._others.adds_parts(residual) else None
        self._others.postpone_sum(residual, self._part(x, weight, adapters) if part is None else part, bias)

    def normalize(self, x: Tensor, norm: Norm, /) -> Tensor:
        """The norm over the last dimension."""
        normed = self._others.normalized(x, norm)
        return TritonOps.normalize(x, norm) if normed is None else normed

    def norm_matmul(self, x: Tensor, norm: Norm | None, weight: DeviceWeight, bias: Tensor | None = None, /) -> Tensor:
        """norm(x) @ weight.T + bias."""
        return super().norm_matmul(*self._normed(x, norm), weight, bias)

    def norm_activate(
        self, x: Tensor, norm: Norm | None, activation: Activation, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """activation(norm(x) @ weight.T + bias), in the form that `add_matmul` takes."""
        return super().norm_activate(*self._normed(x, norm), activation, weight, bias)

    def norm_qkv(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: DeviceWeight,
        bias: Tensor | None,
        rope: RopeTables,
        kv: Tensor,
        slot_mapping: Tensor,
        heads: int,
        qk_norm: Norm | None,
        /,
    ) -> Tensor | None:
        """For few rows the product, the rotation and the write are one kernel."""
        if qk_norm is not None and not isinstance(weight, Tensor):
            return None  # There is no such kernel, so the norm is left to the product.
        return super().norm_qkv(*self._normed(x, norm), weight, bias, rope, kv, slot_mapping, heads, qk_norm)

    def norm_route(
        self, x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool, own: range, /
    ) -> tuple[Tensor, Any]:
        """The norm, which may be a part of the kernel of a sum, the product and the choice, one after the other."""
        return self.norm_then_route(x, norm, router, chosen, normalized, own)

    def _normed(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """The norm of x and no norm, if the kernel of a sum takes it; else both as they are."""
        normed = None if norm is None else self._others.normalized(x, norm)
        return (x, norm) if normed is None else (normed, None)


class InvariantTritonRankOps(SummedOps, InvariantTritonOps):
    """A row has the same bits in any batch and any chunk."""
