"""Products with plain weights on a CPU, packed by oneDNN or MKL. Knows which is faster when, never layers.

oneDNN reads a weight in blocks of the size of the processor's vectors, and it uses the same instructions on the
processors of all makers; MKL uses all vectors of Intel's alone. A row's last bits may depend on the number of rows.
"""

from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PACK_FROM = 1 << 17
"""The fewest elements of a weight that is packed; below, a call of oneDNN costs more than the product."""
PACK_FROM_ON_INTEL = 1 << 22
"""The same for float32 on a processor of Intel's, where MKL is faster for weights that lie in the cache."""
_MKL_ROWS = 128
"""The rows that MKL packs for: its blocks depend on them. The product takes any number."""


class PackedProduct:
    """A product with a weight [N, K] in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ w.T + bias: [T, K] -> [T, N], in the weight's type."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product

    def dense(self) -> Tensor:
        """A copy of the weight [N, K], bit for bit."""
        copy: Tensor = self._packed.to_dense()
        return copy


class MklProduct:
    """A product with a float32 weight [N, K] in MKL's layout, which is faster than a column-major one from two rows
    on."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _MKL_ROWS)
        self._plain = weight.new_empty(1).expand(weight.shape)  # Only its shape is read where the rows agree.
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """x @ w.T + bias: [T, K] -> [T, N]."""
        product: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._plain, bias, x.shape[0])
        return product


@cache
def is_supported(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor multiply packed weights of this type."""
    weight = torch.eye(64, dtype=dtype)
    try:
        product = PackedProduct(weight)
        return torch.equal(product(weight), weight) and torch.equal(product.dense(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's, as far as Linux reports it."""
    with suppress(OSError):
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return False


def is_packed_faster(weight: Tensor) -> bool:
    """Whether a product with this plain weight is faster in oneDNN's layout, as far as this machine supports it."""
    least = PACK_FROM_ON_INTEL if weight.dtype == torch.float32 and is_intel() else PACK_FROM
    return weight.numel() >= least and is_supported(weight.dtype)


@cache
def has_mkl() -> bool:
    """Whether this build of torch multiplies weights in MKL's layout, and with other rows than it packs for."""
    weight = torch.eye(64)
    try:
        return torch.equal(MklProduct(weight)(weight), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def is_mkl_faster(weight: Tensor) -> bool:
    """Whether products of several rows with this plain weight, which oneDNN does not pack, are faster in MKL's
    layout."""
    return weight.dtype == torch.float32 and weight.numel() >= PACK_FROM and is_intel() and has_mkl()
