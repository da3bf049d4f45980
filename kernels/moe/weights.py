"""The weights of a layer's experts on the device: one stack for each tensor of their format. Knows formats, no routing.

    E experts    N outputs    K inputs    G inputs that share a scale

Formats are those of `kernels.quantized_weights`, as they are, so that one kernel reads all experts by their number.
Those that it does not read (NF4, groups that are no multiple of 32, mixed formats) are dequantized.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantized_weights import FP8_BLOCK, Fp8Weight, Int4Weight, Int8Weight, Weight, dequantize

INPUTS = 32
"""Groups of inputs that share a scale are multiples of this."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The tensors of one weight, or with a further first dimension those of all experts."""

    kind: str
    """plain, int8, fp8 or int4."""
    group: int
    """G; 0: all inputs of an output share a scale."""
    rows: int
    """Outputs that share a scale."""
    values: Tensor
    """[N, K] of the model's dtype, int8, or uint8 with the bits of e4m3; int4: uint8 [N, K / 2]."""
    scale: Tensor | None
    """[N / rows, K / G or 1]."""
    zero: Tensor | None
    """uint8 [N, K / G]; None: 8."""
    order: Tensor | None
    """int32 [K]: as `Int4Weight.order`."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are."""
        named = {"values": self.values, "scale": self.scale, "zero": self.zero, "order": self.order}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def is_like(self, other: "Layout") -> bool:
        """Whether both have one format, and tensors of the same shapes and dtypes."""
        mine, its = ({name: (t.shape, t.dtype) for name, t in each.tensors.items()} for each in (self, other))
        return (self.kind, self.group, self.rows, mine) == (other.kind, other.group, other.rows, its)


def lay_out(weight: Weight, dtype: torch.dtype) -> Layout:
    """The tensors of a weight in the form that the kernel reads, for rows of `dtype`."""
    if isinstance(weight, Int8Weight) and weight.group % INPUTS == 0:
        return Layout("int8", weight.group, 1, weight.values, weight.scale.float(), None, None)
    if isinstance(weight, Fp8Weight):
        group, rows = (FP8_BLOCK, FP8_BLOCK) if weight.blockwise else (0, 1)
        scale = weight.scale if weight.blockwise else weight.scale.expand(weight.shape[0], 1)
        return Layout("fp8", group, rows, weight.values.view(torch.uint8), scale.float(), None, None)
    if isinstance(weight, Int4Weight) and weight.group % INPUTS == 0:
        return Layout("int4", weight.group, 1, weight.packed, weight.scale, weight.zero, weight.order)
    return Layout("plain", 0, 1, dequantize(weight, dtype), None, None, None)


class ExpertStack:
    """The weights of E experts, all [N, K] and of one format."""

    def __init__(self, count: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.count, self.outputs, self.inputs, self.dtype = count, outputs, inputs, dtype
        self._whole: Layout | None = None
        self._lock = threading.Lock()

    @property
    def layout(self) -> Layout:
        """The tensors of all experts, [E, ...]."""
        assert self._whole is not None, "the weights are not loaded"
        return self._whole

    def allocate(self, expert: int, /) -> Tensor:
        """Memory for the plain weight of an expert, [N, K]."""
        if self._whole is None:
            values = torch.empty(self.count, self.outputs, self.inputs, dtype=self.dtype)
            self._whole = Layout("plain", 0, 1, values, None, None, None)
        return self._whole.values[expert]

    def keep(self, expert: int, weight: Weight, /) -> Layout:
        """Copy the weight of an expert to the stack, which takes the format of the first one -> its part of the stack.
        Raises ValueError if its format is another."""
        given = lay_out(weight, self.dtype)
        with self._lock:
            if self._whole is None:
                self._whole = self._stack_like(given)
        part = _part(self._whole, expert)
        if not part.is_like(given):
            raise ValueError("the experts of a layer have different formats")
        for name, tensor in given.tensors.items():
            part.tensors[name].copy_(tensor)
        return part

    def _stack_like(self, given: Layout) -> Layout:
        made = {name: tensor.new_empty(self.count, *tensor.shape) for name, tensor in given.tensors.items()}
        return _with_tensors(given, made)


def _part(whole: Layout, expert: int) -> Layout:
    return _with_tensors(whole, {name: tensor[expert] for name, tensor in whole.tensors.items()})


def _with_tensors(layout: Layout, tensors: dict[str, Tensor]) -> Layout:
    return Layout(
        layout.kind,
        layout.group,
        layout.rows,
        tensors["values"],
        tensors.get("scale"),
        tensors.get("zero"),
        tensors.get("order"),
    )
