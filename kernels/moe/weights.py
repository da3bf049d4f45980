"""The weights of a layer's experts on the device: one stack for each tensor of their format. Knows formats, no routing.

    E experts    N outputs    K inputs

Weights of 4 and 8 bits lie in packed words, as `kernels.linear.packed` has them, so that one kernel reads all experts
by their number. Others (NF4, groups that cannot be packed) are dequantized, and all are for rows in float32.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.linear.packed import PackedWeight, can_pack, pack_weight
from kernels.quantized_weights import Fp8Weight, Int4Weight, Int8Weight, Weight, dequantize

ExpertWeight = Tensor | PackedWeight
"""Of one expert, [N, K], or with a further first dimension those of all experts. The scale of inputs is not used."""


def lay_out(weight: Weight, dtype: torch.dtype) -> ExpertWeight:
    """A weight in the form that the kernels read, for rows of `dtype`."""
    words = isinstance(weight, Fp8Weight) or (isinstance(weight, Int4Weight | Int8Weight) and can_pack(weight))
    if not words or dtype == torch.float32:
        return dequantize(weight, dtype)
    assert isinstance(weight, Fp8Weight | Int4Weight | Int8Weight)
    return replace(pack_weight(weight), input_scale=None)


class ExpertStack:
    """The weights of E experts, all [N, K] and of one format."""

    def __init__(self, count: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.count, self.outputs, self.inputs, self.dtype = count, outputs, inputs, dtype
        self._whole: ExpertWeight | None = None
        self._lock = threading.Lock()

    @property
    def weight(self) -> ExpertWeight:
        """Of all experts, [E, ...]."""
        assert self._whole is not None, "the weights are not loaded"
        return self._whole

    def allocate(self, expert: int, /) -> Tensor:
        """Memory for the plain weight of an expert, [N, K]."""
        if self._whole is None:
            self._whole = torch.empty(self.count, self.outputs, self.inputs, dtype=self.dtype)
        assert isinstance(self._whole, Tensor)
        return self._whole[expert]

    def keep(self, expert: int, weight: Weight, /) -> ExpertWeight:
        """Copy the weight of an expert to the stack, which takes the format of the first one -> its part of the stack.
        Raises ValueError if its format is another."""
        given = lay_out(weight, self.dtype)
        with self._lock:
            if self._whole is None:
                self._whole = _mapped(given, lambda tensor: tensor.new_empty(self.count, *tensor.shape))
        part = _mapped(self._whole, lambda tensor: tensor[expert])
        if _format(part) != _format(given):
            raise ValueError("the experts of a layer have different formats")
        for place, tensor in zip(_tensors(part), _tensors(given), strict=True):
            place.copy_(tensor)
        return part


def _tensors(weight: ExpertWeight) -> list[Tensor]:
    if isinstance(weight, Tensor):
        return [weight]
    return [tensor for tensor in (weight.packed, weight.scale, weight.zero, weight.order) if tensor is not None]


def _mapped(weight: ExpertWeight, change: Callable[[Tensor], Tensor]) -> ExpertWeight:
    """The weight with each of its tensors changed."""
    if isinstance(weight, Tensor):
        return change(weight)
    zero = None if weight.zero is None else change(weight.zero)
    order = None if weight.order is None else change(weight.order)
    return replace(weight, packed=change(weight.packed), scale=change(weight.scale), zero=zero, order=order)


def _format(weight: ExpertWeight) -> object:
    """Equal for weights that one stack holds."""
    tensors = [(tensor.shape, tensor.dtype) for tensor in _tensors(weight)]
    if isinstance(weight, Tensor):
        return tensors
    return weight.kind, weight.group, weight.zero is None, weight.order is None, tensors
