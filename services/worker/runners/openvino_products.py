"""Nodes of products with rounded weights in a graph of OpenVINO: integers, which its plugin multiplies with as they
are, and scales. Knows formats of weights, no decoder.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.quantized_weights import Int4Weight, Int8Weight, QuantizedWeight, StackedWeight, Weight, pack_int4


class Products:
    """Makes the nodes."""

    def __init__(self, openvino: Any, weights: Sequence[QuantizedWeight]) -> None:
        """openvino: the module. weights: those of the products, by number."""
        self._openvino, self._ops, self._weights = openvino, openvino.opset13, weights

    def convert(self, node: Any) -> list[Any]:
        """The output of a `PRODUCT`."""
        weight = self._weights[node.get_values_from_const_input(1)]
        return [self._product(node.get_input(0), weight).output(0)]

    def _product(self, x: Any, weight: Weight) -> Any:
        """[T, inputs] -> [T, outputs]."""
        ops = self._ops
        if isinstance(weight, StackedWeight):
            return ops.concat([self._product(x, part) for part in weight.parts], 1)
        if isinstance(weight, Int4Weight) and weight.order is not None:
            x = ops.gather(x, self._integers(weight.order.tolist()), self._integers(1))
        return ops.matmul(x, self._weight(weight), False, True)

    def _weight(self, weight: Weight) -> Any:
        """[outputs, inputs] in stored order: the same numbers as `dequantize`."""
        if isinstance(weight, Int8Weight):
            values = self._ops.constant(_grouped(weight.values, weight.scale).numpy())
            return self._scaled(self._floats(values), weight.scale, weight.shape)
        assert isinstance(weight, Int4Weight), weight
        shape = [*weight.scale.shape, weight.group]
        if weight.zero is None:  # q - 8 in 4 signed bits is q with its highest bit flipped.
            values = self._floats(self._nibbles(weight.packed ^ 0x88, shape, "i4"))
        else:
            zero = weight.zero.flatten()
            packed = pack_int4(torch.cat((zero, zero[: len(zero) % 2]))[None])
            zeros = self._floats(self._nibbles(packed, [*weight.scale.shape, 1], "u4"))
            values = self._ops.subtract(self._floats(self._nibbles(weight.packed, shape, "u4")), zeros)
        return self._scaled(values, weight.scale, weight.shape)

    def _scaled(self, values: Any, scale: Tensor, shape: Sequence[int]) -> Any:
        """values [N, G, K / G] or [N, K]; scale [N, G]."""
        if scale.shape[1] == 1 and len(values.get_output_shape(0)) == 2:
            return self._ops.multiply(values, self._ops.constant(scale.float().numpy()))
        scaled = self._ops.multiply(values, self._ops.constant(scale.float().unsqueeze(2).numpy()))
        return self._ops.reshape(scaled, self._integers(list(shape)), False)

    def _nibbles(self, packed: Tensor, shape: Sequence[int], kind: str) -> Any:
        openvino = self._openvino
        held = openvino.Tensor(packed.contiguous().flatten().numpy(), list(shape), getattr(openvino.Type, kind))
        return openvino.op.Constant(held, shared_memory=False)

    def _floats(self, constant: Any) -> Any:
        return self._ops.convert(constant, "f32")

    def _integers(self, values: Any) -> Any:
        return self._ops.constant(np.array(values, np.int64))


def _grouped(values: Tensor, scale: Tensor) -> Tensor:
    """values [N, K] by the scale that they share: [N, G, K / G] where there are several in a row."""
    return values if scale.shape[1] == 1 else values.reshape(*scale.shape, -1)
