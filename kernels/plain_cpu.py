"""Products with plain weights on a CPU, by oneDNN. Knows for which weights it is faster than MKL, never layers.

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
