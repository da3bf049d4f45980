"""The canonical layouts of quantized weights, one for each format, and rounding to them.

Knows the meaning of every byte, never files, layers or fast kernels.

    N outputs    K inputs    G inputs that share a scale    w[n, k] the weight that x @ w.T + bias multiplies with
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_BLOCK = 128
"""Rows and columns that share a scale in block-wise FP8."""
INT4_ZERO = 8
NF4_BLOCK = 64
_SMALLEST_GROUP = 8

# The quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, Dettmers et al. 2023, appendix E).
NF4_CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight(ABC):
    """A weight [N, K] in fewer bits."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(N, K)."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight, computed in float32: [N, K], columns in the order of the inputs."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> "Weight":
        """The weight of outputs `start` to `stop`."""

    def columns(self, start: int, stop: int) -> "QuantizedWeight":
        """The weight of inputs `start` to `stop`. Raises ValueError if that would divide numbers of one scale."""
        raise ValueError(f"the inputs of {type(self).__name__} cannot be divided")

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self | None:
        """This weight's outputs followed by the others'; None if this format cannot represent the result."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self._tensors().values())).device

    def to(self, device: torch.device | str) -> Self:
        """The same weight on a device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


Weight = Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight(QuantizedWeight):
    """w = values * scale, with one scale for each output or for each group of an output's inputs."""

    values: Tensor
    """int8 [N, K]."""
    scale: Tensor
    """float32 [N, 1] or [N, K / group]."""
    dynamic_activations: bool = False
    """Whether inputs are rounded to int8 too, with a scale for each row (W8A8)."""

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.values.shape

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all of an output's inputs do."""
        return 0 if self.scale.shape[1] == 1 else self.shape[1] // self.scale.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [N, K]."""
        groups = self.values.reshape(*self.scale.shape, -1).float()
        return (groups * self.scale.unsqueeze(-1)).flatten(1).to(dtype)

    def rows(self, start: int, stop: int) -> "Int8Weight":
        """The weight of outputs `start` to `stop`."""
        return replace(self, values=self.values[start:stop], scale=self.scale[start:stop])

    def columns(self, start: int, stop: int) -> "Int8Weight":
        """The weight of inputs `start` to `stop`."""
        if self.group:
            _check_edges(start, stop, self.group)
        scale = self.scale[:, start // self.group : stop // self.group] if self.group else self.scale
        return replace(self, values=self.values[:, start:stop].contiguous(), scale=scale)

    def join(self, others: Sequence[Self]) -> Self | None:
        """One weight, if all have the same group and `dynamic_activations`."""
        parts = (self, *others)
        if len({(part.group, part.dynamic_activations) for part in parts}) > 1:
            return None
        return replace(self, values=torch.cat([p.values for p in parts]), scale=torch.cat([p.scale for p in parts]))


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight(QuantizedWeight):
    """w = (q - zero) * scale, with q in 0..15 and a scale and a zero for each group of inputs.

    With `order`, stored column j is the weight of input order[j] (GPTQ's act-order): y = x[:, order] @ stored.T.
    """

    packed: Tensor
    """uint8 [N, K / 2]: even columns in the low half of a byte."""
    scale: Tensor
    """float16, bfloat16 or float32 [N, K / group]."""
    zero: Tensor | None
    """uint8 [N, K / group]; None: 8 everywhere."""
    group: int
    """Inputs that share a scale, G."""
    order: Tensor | None = None
    """int32 [K]; None: the inputs' own order."""

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))

    def unpack(self) -> Tensor:
        """The stored q: uint8 [N, K]."""
        return torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(1)

    def stored(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight, columns in stored order: [N, K]."""
        rows = self.packed.shape[0]
        q = self.unpack().view(rows, -1, self.group).float()
        zero = INT4_ZERO if self.zero is None else self.zero.unsqueeze(-1).float()
        return ((q - zero) * self.scale.unsqueeze(-1).float()).flatten(1).to(dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight, columns in the order of the inputs: [N, K]."""
        stored = self.stored(dtype)
        return stored if self.order is None else stored[:, self.order.argsort()]

    def rows(self, start: int, stop: int) -> "Int4Weight":
        """The weight of outputs `start` to `stop`."""
        zero = None if self.zero is None else self.zero[start:stop]
        return replace(self, packed=self.packed[start:stop], scale=self.scale[start:stop], zero=zero)

    def columns(self, start: int, stop: int) -> "Int4Weight":
        """The weight of inputs `start` to `stop`. Groups become smaller where one would be divided."""
        group = math.gcd(self.group, start, stop)
        if self.order is not None or group < _SMALLEST_GROUP:
            raise ValueError(f"inputs {start} to {stop} divide a group of {self.group}")
        groups, repeats = slice(start // group, stop // group), self.group // group
        scale = self.scale.repeat_interleave(repeats, 1)[:, groups]
        zero = None if self.zero is None else self.zero.repeat_interleave(repeats, 1)[:, groups]
        packed = self.packed[:, start // 2 : stop // 2].contiguous()
        return replace(self, packed=packed, scale=scale, zero=zero, group=group)

    def join(self, others: Sequence[Self]) -> Self | None:
        """One weight, if all have the same group and order of inputs."""
        parts = (self, *others)
        if any(p.group != self.group or not _same(p.order, self.order) for p in parts):
            return None
        zero = None
        if any(p.zero is not None for p in parts):
            zero = torch.cat([_zeros_of(p) for p in parts])
        packed, scale = torch.cat([p.packed for p in parts]), torch.cat([p.scale for p in parts])
        return replace(self, packed=packed, scale=scale, zero=zero)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(QuantizedWeight):
    """w = values * scale, with one scale for all, for each output, or for each block of 128 x 128."""

    values: Tensor
    """float8_e4m3fn [N, K]."""
    scale: Tensor
    """float32 [1, 1], [N, 1] or [ceil(N / 128), ceil(K / 128)]."""
    input_scale: Tensor | None = None
    """float32 []: the static scale of inputs that are rounded to FP8; None: each row has its own scale."""

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.values.shape

    @property
    def blockwise(self) -> bool:
        """Whether scales belong to blocks."""
        return self.scale.shape[1] > 1 or self.scale.shape[0] not in (1, self.shape[0])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [N, K]."""
        scale = self.scale
        if self.blockwise:
            scale = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
            scale = scale[: self.shape[0], : self.shape[1]]
        return (self.values.float() * scale).to(dtype)

    def rows(self, start: int, stop: int) -> "Fp8Weight":
        """The weight of outputs `start` to `stop`, which must be at the edges of blocks."""
        scale = self.scale
        if self.blockwise:
            assert start % FP8_BLOCK == 0, f"row {start} lies inside a block"
            scale = scale[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        elif scale.shape[0] > 1:
            scale = scale[start:stop]
        return replace(self, values=self.values[start:stop], scale=scale)

    def columns(self, start: int, stop: int) -> "Fp8Weight":
        """The weight of inputs `start` to `stop`, which must be at the edges of blocks."""
        scale = self.scale
        if self.blockwise:
            _check_edges(start, stop, FP8_BLOCK)
            scale = scale[:, start // FP8_BLOCK : stop // FP8_BLOCK]
        return replace(self, values=self.values[:, start:stop].contiguous(), scale=scale)

    def join(self, others: Sequence[Self]) -> Self | None:
        """One weight, if all have the same input scale and the blocks are aligned."""
        parts = (self, *others)
        if any(not _same(p.input_scale, self.input_scale) for p in parts):
            return None
        if any(p.blockwise for p in parts):
            # A single scale is that of a block if the weight is not larger than a block.
            whole = all(p.shape[0] % FP8_BLOCK == 0 for p in parts[:-1])
            if not whole or not all(p.blockwise or max(p.shape) <= FP8_BLOCK for p in parts):
                return None
            scale = torch.cat([p.scale for p in parts])
        else:
            scale = torch.cat([p.scale.expand(p.shape[0], 1) for p in parts])
        values = torch.cat([p.values.view(torch.uint8) for p in parts]).view(FP8)
        return replace(self, values=values, scale=scale)


@dataclass(frozen=True, slots=True, eq=False)
class Nf4Weight(QuantizedWeight):
    """w = code[q] * absmax, one absmax for each 64 consecutive numbers in memory (the layout of bitsandbytes)."""

    packed: Tensor
    """uint8 [N, K / 2]: even columns in the high half of a byte."""
    absmax: Tensor
    """float32 [N * K / 64]."""
    code: Tensor
    """float32 [16]."""

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [N, K]."""
        q = torch.stack((self.packed >> 4, self.packed & 15), dim=-1).reshape(-1, NF4_BLOCK)
        return (self.code[q.int()] * self.absmax[:, None]).view(self.shape).to(dtype)

    def rows(self, start: int, stop: int) -> "Nf4Weight":
        """The weight of outputs `start` to `stop`, which must be at the edges of blocks."""
        begin, end = start * self.shape[1], stop * self.shape[1]
        assert begin % NF4_BLOCK == end % NF4_BLOCK == 0, f"rows {start} to {stop} lie inside a block"
        absmax = self.absmax[begin // NF4_BLOCK : end // NF4_BLOCK]
        return replace(self, packed=self.packed[start:stop], absmax=absmax)

    def columns(self, start: int, stop: int) -> "Nf4Weight":
        """The weight of inputs `start` to `stop`, which must be at the edges of blocks."""
        _check_edges(start, stop, NF4_BLOCK)
        _check_edges(0, self.shape[1], NF4_BLOCK)
        absmax = self.absmax.view(self.shape[0], -1)[:, start // NF4_BLOCK : stop // NF4_BLOCK]
        return replace(self, packed=self.packed[:, start // 2 : stop // 2].contiguous(), absmax=absmax.flatten())

    def join(self, others: Sequence[Self]) -> Self | None:
        """One weight, if all have the same code."""
        parts = (self, *others)
        if any(not torch.equal(p.code, self.code) for p in parts):
            return None
        packed, absmax = torch.cat([p.packed for p in parts]), torch.cat([p.absmax for p in parts])
        return replace(self, packed=packed, absmax=absmax)


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight(QuantizedWeight):
    """Weights of the same inputs in different formats; their outputs are concatenated."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.parts[0].device

    def to(self, device: torch.device | str) -> "StackedWeight":
        """The same weight on a device."""
        return StackedWeight(tuple(part.to(device) for part in self.parts))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [N, K]."""
        return torch.cat([dequantize(part, dtype) for part in self.parts])

    def rows(self, start: int, stop: int) -> Weight:
        """The weight of outputs `start` to `stop`."""
        taken, begin = [], 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, part.shape[0])
            if first < last:
                taken.append(part[first:last] if isinstance(part, Tensor) else part.rows(first, last))
            begin += part.shape[0]
        return concat(taken)

    def join(self, others: Sequence[Self]) -> Self | None:
        """One stack of all parts."""
        return replace(self, parts=tuple(part for stack in (self, *others) for part in stack.parts))


def concat(parts: Sequence[Weight]) -> Weight:
    """One weight with the outputs of all parts in this order: of their format if it can represent them, else
    stacked."""
    first, *others = parts
    if not others:
        return first
    if any(type(part) is not type(first) for part in parts):
        return StackedWeight(tuple(parts))
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    joined = first.join([part for part in others if isinstance(part, QuantizedWeight)])
    return StackedWeight(tuple(parts)) if joined is None else joined


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight of any format: [N, K]."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias by definition, the reference of all kernels: x [T, K] -> [T, N] in x's dtype."""
    if isinstance(weight, StackedWeight):
        out = torch.cat([linear(x, part) for part in weight.parts], dim=1)
        return out if bias is None else out.add_(bias)
    if isinstance(weight, Int8Weight) and weight.dynamic_activations:
        values, scale = quantize_rows_int8(x)
        x = (values * scale).to(x.dtype)
    return F.linear(x, dequantize(weight, x.dtype), bias)


# ---- rounding ----


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Round to the nearest of 255 steps between -max and max of each output. weight [N, K]."""
    values, scale = quantize_rows_int8(weight)
    return Int8Weight(values, scale)


def quantize_rows_int8(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 values [T, K] and float32 scales [T, 1] of rows of numbers: x is about values * scale. largest, float32
    [T, 1]: the largest magnitudes of rows of which x is a part; None: of x."""
    numbers = x.float()
    largest = numbers.abs().amax(1, keepdim=True) if largest is None else largest
    scale = largest.clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (numbers / scale).round_().to(torch.int8), scale


def quantize_int4(weight: Tensor, group: int | None = None) -> Int4Weight:
    """Round to 16 steps for each group of inputs, symmetric: a group's number of largest magnitude becomes -8 steps.

    The scale's sign is chosen accordingly, so that all 16 values are used (as in llama.cpp's Q4_0).
    weight [N, K]; group divides K (None: 128, or the largest power of two below it that does).
    """
    group = group or group_of(weight.shape[1])
    groups = weight.float().reshape(weight.shape[0], -1, group)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).to(torch.float32 if weight.dtype == torch.float32 else weight.dtype)
    step = torch.where(scale == 0, 1, scale.float())
    q = (groups / step).round_().clamp_(-8, 7).add_(INT4_ZERO).to(torch.uint8).flatten(1)
    return Int4Weight(pack_int4(q), scale.squeeze(2), None, group)


def group_of(inputs: int) -> int:
    """The largest group size up to 128 that divides `inputs`. Raises ValueError if it is below 8."""
    group = min(128, inputs & -inputs)
    if group < _SMALLEST_GROUP:
        raise ValueError(f"{inputs} inputs cannot be shared out in groups of {_SMALLEST_GROUP} or more")
    return group


def pack_int4(q: Tensor) -> Tensor:
    """Values 0..15, uint8 [N, K] -> uint8 [N, K / 2], even columns in the low half."""
    return q[:, 0::2] | q[:, 1::2] << 4


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Round to float8_e4m3fn with one scale for each output. weight [N, K]."""
    numbers = weight.float()
    scale = numbers.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
    return Fp8Weight((numbers / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale)


def quantize_nf4(weight: Tensor) -> Nf4Weight:
    """Round to the nearest of 16 quantiles for each 64 numbers. weight [N, K], N * K a multiple of 64."""
    code = torch.tensor(NF4_CODE, device=weight.device)
    blocks = weight.float().reshape(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(1)
    between = (code[1:] + code[:-1]) / 2
    q = torch.bucketize(blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny)[:, None], between).to(torch.uint8)
    q = q.view(weight.shape)
    return Nf4Weight(q[:, 0::2] << 4 | q[:, 1::2], absmax, code)


QUANTIZERS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
    "nf4": quantize_nf4,
}
"""The values of `--quantize`."""


def _check_edges(start: int, stop: int, block: int) -> None:
    """Raises ValueError if inputs `start` to `stop` are no whole blocks."""
    if start % block or stop % block:
        raise ValueError(f"inputs {start} to {stop} divide a block of {block}")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _zeros_of(weight: Int4Weight) -> Tensor:
    full = torch.full(weight.scale.shape, INT4_ZERO, dtype=torch.uint8, device=weight.device)
    return full if weight.zero is None else weight.zero
