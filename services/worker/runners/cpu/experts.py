"""The weights of a layer's experts on a CPU, each in the layout of its kernel. Knows no routing."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized_cpu import Product
from kernels.quantized_weights import Weight


class WeightOps(Protocol):
    """How one weight is laid out."""

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Memory for a plain weight [outputs, inputs]."""

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Tensor | Product:
        """The weight in the layout of its kernel."""


class ExpertList:
    """`ExpertWeights` of a CPU: a weight for each expert. Iterating gives what products are computed with."""

    def __init__(self, ops: WeightOps, count: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self._ops, self._shape, self._dtype = ops, (outputs, inputs), dtype
        self._weights: list[Tensor | Product | None] = [None] * count

    def __iter__(self) -> Iterator[Tensor | Product]:
        for weight in self._weights:
            assert weight is not None, "the weights are not loaded"
            yield weight

    def allocate(self, expert: int, /) -> Tensor:
        """Memory for the plain weight of an expert."""
        self._weights[expert] = weight = self._ops.empty_weight(*self._shape, self._dtype)
        return weight

    def keep(self, expert: int, weight: Weight, /) -> Tensor | Product:
        """Prepare the weight of an expert and keep it."""
        self._weights[expert] = prepared = self._ops.prepare(weight, self._dtype)
        return prepared
