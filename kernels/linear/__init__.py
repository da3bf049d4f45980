"""Linear layers with weights of any format: chooses the kernel, or cuBLAS, by format and number of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import silu_and_mul
from kernels.linear import dense, fp8, qkv_rope
from kernels.linear.nf4 import dequantize_nf4
from kernels.linear.packed import PackedWeight, can_pack, dequantize, pack_weight
from kernels.linear.packed_gemm import hopper_for, linear_packed, serves
from kernels.linear.split_k import Tile
from kernels.norm import normalize
from kernels.operands import Activation, Norm, NormKind
from kernels.quantized_weights import (
    FP8,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nf4Weight,
    QuantizedWeight,
    StackedWeight,
    Weight,
)


@dataclass(frozen=True, slots=True, eq=False)
class StackedPrepared:
    """Weights of the same inputs in different formats; their outputs are concatenated."""

    parts: tuple["DeviceWeight", ...]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)


DeviceWeight = Tensor | QuantizedWeight | PackedWeight | StackedPrepared
"""A weight as `prepare` returns it."""


def prepare(weight: Weight, dtype: torch.dtype) -> DeviceWeight:
    """The weight in the layout of the kernels for rows of `dtype`. The original may be freed."""
    if isinstance(weight, StackedWeight):
        return StackedPrepared(tuple(prepare(part, dtype) for part in weight.parts))
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if dtype == torch.float32:
        return weight
    if isinstance(weight, Fp8Weight) or (isinstance(weight, Int4Weight | Int8Weight) and can_pack(weight)):
        return pack_weight(weight)
    return weight


def linear(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight.T + bias + residual; gated: silu(first half) * second half of the product. As `dense.linear`.

    If x is twice as wide as the weight's inputs, it holds gates and ups from `gate`, which are gated here.
    """
    late = x.shape[1] == 2 * _inputs(weight)
    if rounds_to_fp8(x, weight):
        assert isinstance(weight, PackedWeight)
        if norm is not None and norm.kind is not NormKind.RMS:
            x, norm = normalize(x, norm), None
        before = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        rounded = fp8.round_rows(x, *before, gated=late, given=weight.input_scale)
        return _multiply(rounded, weight, x.dtype, bias, residual, gated, out)
    if late:
        x = silu_and_mul(x)
    if norm is not None:
        x = normalize(x, norm)
    if isinstance(weight, StackedPrepared):
        product = torch.cat([linear(x, part) for part in weight.parts], 1)
        return _surround(product, bias, residual, gated, out)
    if isinstance(weight, PackedWeight) and serves(x, weight, gated):
        return linear_packed(x, weight, bias, residual=residual, gated=gated, out=out)
    if isinstance(weight, Tensor):
        return dense.linear(x, weight, bias, residual=residual, gated=gated, out=out)
    return dense.cublas(in_order(x, weight), to_dense(weight, x.dtype), bias, residual, gated, out)


def parts(x: Tensor, weight: DeviceWeight) -> Tensor | None:
    """As `dense.parts`; None also for a weight that is not plain, and for inputs that are gated here."""
    return dense.parts(x, weight) if isinstance(weight, Tensor) and x.shape[1] == weight.shape[1] else None


def gate(x: Tensor, weight: DeviceWeight, norm: Norm | None) -> Tensor:
    """silu(gate) * up of norm(x) [T, K], or of x without a norm, where gate and up are the halves of the weight's
    outputs: [T, n]. If the rows are rounded to fp8, the result is gates and ups [T, 2n]: the next linear layer gates
    and rounds them in one kernel."""
    return linear(x, weight, norm=norm, gated=not rounds_to_fp8(x, weight))


def fuses_gelu(x: Tensor, activation: Activation) -> bool:
    """Whether cuBLAS computes this activation as a part of a product with a plain weight: of 16-bit rows, ungated."""
    return x.is_cuda and x.dtype.itemsize == 2 and activation in (Activation.GELU, Activation.GELU_TANH)


def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of x @ weight.T + bias where `fuses_gelu`, always by the tanh approximation, which is off by 5e-4 at most:
    beside what bfloat16 rounds off (1 - cosine of 4e-6 to 2e-4 in vectors of BERT's shapes) it adds 1e-9 to 2e-7."""
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def rotated_qkv(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None, norm: Norm | None, cos: Tensor, sin: Tensor,
    positions: Tensor, kv: Tensor, slot_mapping: Tensor, heads: int, qk_norm: Norm | None = None,
) -> Tensor | None:  # fmt: skip
    """Project norm(x), or x, to queries, keys and values, rotate, write keys and values to the pool -> queries
    [M, H, D].

    As `qkv_rope.rotated_qkv`; with a packed weight the pool may also be fp8 without scales. None where the fused kernel
    is not faster.
    """
    if isinstance(weight, PackedWeight) and not rounds_to_fp8(x, weight) and kv.dtype in (x.dtype, FP8):
        if qk_norm is not None:
            return None
        hopper = hopper_for(x)
        shape = hopper.rotated_shape_for(weight, len(x), kv.shape[4]) if hopper else None
        if hopper is None or shape is None:
            return None
        normed = x if norm is None else normalize(x, norm)
        q: Tensor = hopper.rotated_qkv(normed, weight, bias, cos, sin, positions, kv, slot_mapping, heads, shape)
        return q
    if not isinstance(weight, Tensor) or kv.dtype != x.dtype or len(x) == 0:
        return None
    tile = qkv_rope.tile_for(x, len(weight), kv.shape[4], qk_norm is not None)
    if tile is None or (qk_norm is not None and isinstance(tile, Tile)):
        return None
    normed = x if norm is None else normalize(x, norm)
    return qkv_rope.rotated_qkv(normed, weight, bias, cos, sin, positions, kv, slot_mapping, heads, tile, qk_norm)


def rounds_to_fp8(x: Tensor, weight: DeviceWeight) -> bool:
    """Whether x is rounded to fp8 before the product with this weight."""
    return isinstance(weight, PackedWeight) and fp8.multiplies(weight) and len(x) >= fp8.min_rows(x.device)


def _multiply(
    rounded: tuple[Tensor, Tensor],
    weight: PackedWeight,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out: Tensor | None,
) -> Tensor:
    """The product of fp8 rows, with bias, residual or gate."""
    values, scales = rounded
    hopper = None if gated else hopper_for(values)
    if hopper and (shape := hopper.shape_for(weight, len(values), gated, rounded=True)):
        out = torch.empty(len(values), weight.shape[0], dtype=dtype, device=values.device) if out is None else out
        hopper.linear(values, weight, bias, residual, gated, out, shape, scales)
        return out
    return _surround(fp8.multiply(rounded, weight, dtype), bias, residual, gated, out)


def _inputs(weight: DeviceWeight) -> int:
    return _inputs(weight.parts[0]) if isinstance(weight, StackedPrepared) else weight.shape[1]


def invariant(x: Tensor, weight: DeviceWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; a row's bits do not depend on the other rows or their number."""
    if isinstance(weight, StackedPrepared):
        product = torch.cat([invariant(x, part) for part in weight.parts], 1)
        return product if bias is None else product + bias
    return dense.matmul_invariant(in_order(x, weight), to_dense(weight, x.dtype), bias)


def in_order(x: Tensor, weight: DeviceWeight) -> Tensor:
    """x with its columns in the order of the weight's stored columns."""
    if isinstance(weight, PackedWeight) and weight.order is not None:
        return x.index_select(1, weight.order)
    return x


def to_dense(weight: Tensor | QuantizedWeight | PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight dequantized into a temporary [N, K], columns in stored order."""
    if isinstance(weight, PackedWeight):
        return dequantize(weight, dtype)
    if isinstance(weight, Nf4Weight) and weight.packed.is_cuda:
        return dequantize_nf4(weight, dtype)
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight


def _surround(product: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor | None) -> Tensor:
    """Add bias, gate or add the residual after a product that does not fuse them; may overwrite `product`."""
    if bias is not None:
        product.add_(bias)
    if gated:
        return silu_and_mul(product, out)
    if residual is not None:
        return torch.add(product, residual, out=out)
    return product if out is None else out.copy_(product)
