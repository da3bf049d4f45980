"""Products with rounded weights that a runtime multiplies by itself: each is one operation of the traced graph.

Knows which formats such a runtime holds, no runtime: what converts the graph finds the weights by their numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantized_weights import Int4Weight, Int8Weight, QuantizedWeight, StackedWeight, Weight
from services.worker.runners.runtime.network import DenseOps

PRODUCT = "weft::product"
"""x [T, inputs] times the transposed weight of a number -> [T, outputs]. Torch traces it, and computes it nowhere."""

torch.library.define(PRODUCT, "(Tensor x, int number, int outputs) -> Tensor")
torch.library.register_fake(PRODUCT, lambda x, number, outputs: x.new_empty(x.shape[0], outputs))


@dataclass(frozen=True, slots=True)
class NumberedProduct:
    """A product with a weight that is not in the graph."""

    number: int
    """The weight's place in `RoundedOps.weights`."""
    outputs: int
    nbytes: int
    """Bytes of the weight."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias: [T, inputs] -> [T, outputs]."""
        out: Tensor = torch.ops.weft.product(x, self.number, self.outputs)
        return out if bias is None else out + bias


class RoundedOps(DenseOps):
    """Operations of a graph whose rounded weights stay rounded."""

    def __init__(self) -> None:
        self.weights: list[QuantizedWeight] = []

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Tensor | NumberedProduct:  # type: ignore[override]
        """Keep a weight of 4 or 8 bits as it is; others become plain numbers."""
        if isinstance(weight, Tensor) or not stays_rounded(weight):
            return super().prepare(weight, dtype)
        self.weights.append(weight)
        return NumberedProduct(len(self.weights) - 1, weight.shape[0], weight.nbytes)


def stays_rounded(weight: Weight) -> bool:
    """Whether a runtime multiplies with the same numbers: integers times a scale, and inputs that are not rounded."""
    if isinstance(weight, StackedWeight):
        return all(stays_rounded(part) for part in weight.parts)
    return isinstance(weight, Int4Weight) or (isinstance(weight, Int8Weight) and not weight.dynamic_activations)
