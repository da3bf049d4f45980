"""Linear layers with quantized weights on a CPU. Knows which operation of torch serves which format, never layers.

INT8 weights are multiplied in exact integer arithmetic: inputs are rounded to 8 bits if the weight asks for it, else to
16 bits in two halves. Processors without an instruction for it (x86 before AVX-VNNI and AVX512-VNNI) multiply the same
integers as floating-point numbers, in sums so short that these are exact. INT4 weights use torch's packed kernel in
bfloat16. Other formats (FP8, NF4, INT8 in groups, odd shapes) are dequantized. A row's bits do not depend on the batch.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import quantized_weights
from kernels.quantized_weights import INT4_ZERO, Int4Weight, Int8Weight, StackedWeight, Weight
from kernels.reference.layers import matmul_invariant

_PACK_FROM = 1 << 20
"""The fewest elements of a weight for which oneDNN's layout is faster; below, its call costs more than the product."""
_EXACT_TERMS = 1 << 10
"""Products of two int8 whose sum float32 holds exactly, in whatever order: 2**14 each at most, 2**24 together."""
_TILE = 1 << 18
"""Elements of a weight that are converted at a time: as float32 they stay in a core's cache."""
_FINEST = 127 * 256 + 127
_INT4_GROUPS = (256, 128, 64, 32)
_INT4_OUTPUTS = 16


class Product(Protocol):
    """A weight [N, K] in the layout of its kernel."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ w.T + bias: [T, K] -> [T, N] in x's type."""


def prepare(weight: Weight, dtype: torch.dtype) -> Tensor | Product:
    """The weight in the layout of its kernel; a plain tensor of `dtype` if no kernel of this file supports it."""
    if isinstance(weight, StackedWeight):
        return StackedProduct([prepare(part, dtype) for part in weight.parts])
    if isinstance(weight, Int8Weight) and not weight.group:
        return Int8Product(weight)
    if isinstance(weight, Int4Weight) and _int4_group(weight):
        return Int4Product(weight)
    return quantized_weights.dequantize(weight, dtype)


class Int8Product:
    """A product with int8 weights in exact integer arithmetic."""

    def __init__(self, weight: Int8Weight) -> None:
        self._scale = weight.scale.view(-1)
        self._halves = not weight.dynamic_activations
        self._in_floats = not _packed_is_exact()
        self._packed = weight.values.numel() >= _PACK_FROM and not self._in_floats
        self._weight = weight.values.T
        if self._packed:
            self._weight = torch.ops.onednn.qlinear_prepack(weight.values, None)
            self._no_zeros = torch.zeros_like(self._scale, dtype=torch.int32)
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, largest: Tensor | None = None, /) -> Tensor:
        """x @ w.T + bias. largest, float32 [T, 1]: the largest magnitudes of rows of which x is a part; None: of x."""
        if self._halves:
            high, low, scale = _halves(x, largest)
            rows = x.shape[0]
            if rows == 1 and not self._packed and not self._in_floats:  # two of one row are faster than one of two
                sums = self._sums(high).mul_(256).add_(self._sums(low))
            else:
                both = self._sums(torch.cat((high, low)))
                sums = both[:rows].mul_(256).add_(both[rows:])
        else:
            values, scale = quantized_weights.quantize_rows_int8(x, largest)
            sums = self._sums(values)
        out = sums.mul_(scale)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def _sums(self, values: Tensor) -> Tensor:
        """int8 [T, K] -> float32 [T, N]: the integer product times the weight's scale."""
        if self._in_floats:
            return _sums_in_floats(values, self._weight.T).mul_(self._scale)
        if not self._packed:
            return torch._int_mm(values, self._weight).float().mul_(self._scale)
        return _onednn(values, self._weight, self._scale, self._no_zeros)


def _onednn(values: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """oneDNN's fast instruction multiplies unsigned by signed: shift by 128, which the zero point takes back."""
    shifted = values.view(torch.uint8) ^ 128
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        shifted, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _sums_in_floats(values: Tensor, weight: Tensor) -> Tensor:
    """int8 [T, K], int8 [N, K] -> float32 [T, N]: the integer product, rounded once."""
    numbers, outputs = values.float(), weight.shape[0]
    tile = max(1, _TILE // min(values.shape[1], _EXACT_TERMS))
    sums = numbers.new_empty(values.shape[0], outputs)
    for first in range(0, outputs, tile):
        sums[:, first : first + tile] = _sums_of_tile(numbers, weight[first : first + tile])
    return sums


def _sums_of_tile(numbers: Tensor, weight: Tensor) -> Tensor:
    terms = [slice(first, first + _EXACT_TERMS) for first in range(0, weight.shape[1], _EXACT_TERMS)]
    sums, *others = (F.linear(numbers[:, some], weight[:, some].float()) for some in terms)
    if not others:
        return sums
    return sum((other.int() for other in others), sums.int()).float()


@cache
def _packed_is_exact() -> bool:
    """Whether oneDNN's int8 product exists and does not saturate (old processors add pairs in 16 bits)."""
    values, weight = torch.full((2, 64), 127, dtype=torch.int8), torch.full((32, 64), 127, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        got = _onednn(values, packed, torch.ones(32), torch.zeros(32, dtype=torch.int32))
    except (RuntimeError, AttributeError):
        return False
    return bool((got == 127 * 127 * 64).all())


def _halves(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """int8 high and low [T, K], float32 scale [T, 1]: x = (256 * high + low) * scale, rounded to 16 bits per row."""
    numbers = x.float()
    largest = numbers.abs().amax(1, keepdim=True) if largest is None else largest
    scale = largest.clamp_min(torch.finfo(torch.float32).tiny * _FINEST) / _FINEST
    whole = (numbers / scale).round_().to(torch.int32)
    high = (whole + 128) >> 8
    return high.to(torch.int8), (whole - (high << 8)).to(torch.int8), scale


class Int4Product:
    """A product with int4 weights by torch's packed kernel."""

    def __init__(self, weight: Int4Weight) -> None:
        self._group = _int4_group(weight)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(weight.unpack().int(), 1)
        self._order = weight.order
        repeats = weight.group // self._group
        scale = weight.scale.float().repeat_interleave(repeats, 1)
        zero = torch.zeros_like(scale)
        if weight.zero is not None:
            zero = (INT4_ZERO - weight.zero.float()).repeat_interleave(repeats, 1) * scale
        self._scales = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        order = 0 if self._order is None else self._order.nbytes
        return self._packed.nbytes + self._scales.nbytes + order

    def __call__(self, x: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ w.T + bias."""
        inputs = x if self._order is None else x[:, self._order]
        out = torch._weight_int4pack_mm_for_cpu(inputs.bfloat16(), self._packed, self._group, self._scales).to(x.dtype)
        return out if bias is None else out.add_(bias)


def _int4_group(weight: Int4Weight) -> int:
    """The kernel's largest group size that divides the weight's; 0: the kernel does not support this weight."""
    fitting = [group for group in _INT4_GROUPS if weight.group % group == 0]
    return fitting[0] if fitting and weight.shape[0] % _INT4_OUTPUTS == 0 else 0


class StackedProduct:
    """Products of the same inputs; their outputs are concatenated."""

    def __init__(self, parts: Sequence[Tensor | Product]) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ w.T + bias."""
        out = torch.cat([self._product(x, part) for part in self._parts], dim=1)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def _product(x: Tensor, part: Tensor | Product) -> Tensor:
        return matmul_invariant(x, part) if isinstance(part, Tensor) else part(x)
