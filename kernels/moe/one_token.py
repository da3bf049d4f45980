"""The experts of one token on a Hopper, by the kernels of products of one row. The first product weights its results,
so that the second one is a single sum over the neurons of all chosen experts, which is added to the residual.

    E experts    k chosen experts    N neurons of an expert    K numbers of a row
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.linear import dense_hopper
from kernels.linear.gemv import dense as dense_gemv
from kernels.linear.gemv import packed as packed_gemv
from kernels.linear.gemv.packed import Shape
from kernels.linear.packed import PackedWeight
from kernels.moe.weights import ExpertStack
from kernels.operands import Activation, Norm, NormKind


@dataclass(frozen=True, slots=True)
class Chances:
    """What the experts of one token are chosen by."""

    logits: Tensor
    """[1, E], in the dtype of the row."""
    chosen: int
    normalized: bool
    """The weights of the chosen experts sum to 1; otherwise they are parts of the softmax over all experts."""


_PROGRAMS, _NUMBERS = 64, 64
"""Programs of the router's product, and numbers that a thread holds."""
MOST_EXPERTS, MOST_CHOSEN = 256, 8
"""Each program chooses the experts anew."""


@triton.jit
def router_kernel(
    x,  # [1, K]
    norm,  # [K]
    router,  # [E, K]
    normed,  # [1, K] out
    logits,  # [1, E] out
    K, eps,
    E: tl.constexpr, EACH: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes EACH logits of the normalized row."""
    columns = tl.arange(0, BLOCK_K)
    experts = tl.program_id(0) * EACH + tl.arange(0, EACH)
    inside = columns < K
    known = (experts < E)[:, None] & inside[None, :]
    lines = tl.load(router + experts[:, None] * K + columns[None, :], mask=known, other=0.0)
    scale = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    number = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(number * number) / K + eps)
    row = (number * inverse * scale).to(normed.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + columns, row, mask=inside)
    found = tl.sum(lines.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    tl.store(logits + experts, found.to(logits.dtype.element_ty), mask=experts < E)


def serves(x: Tensor, norm: Norm, experts: int, chosen: int) -> bool:
    """Whether these kernels support one token and this router."""
    fits = len(x) == 1 and norm.kind is NormKind.RMS and experts <= MOST_EXPERTS and chosen <= MOST_CHOSEN
    return fits and dense_hopper.serves(x) and x.shape[1] <= 8192


def norm_router(x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool) -> tuple[Tensor, Chances]:
    """norm(x) [1, K], and its product with the router [E, K]."""
    experts, k = router.shape
    assert router.is_contiguous()
    normed, logits = torch.empty(1, k, dtype=x.dtype, device=x.device), x.new_empty(1, experts)
    each, block = triton.next_power_of_2(triton.cdiv(experts, _PROGRAMS)), triton.next_power_of_2(k)
    warps = triton.next_power_of_2(triton.cdiv((each + 2) * block, 32 * _NUMBERS))
    router_kernel[(triton.cdiv(experts, each),)](
        x, norm.weight, router, normed, logits, k, norm.eps, E=experts, EACH=each, BLOCK_K=block, num_warps=warps,
        **launch_options(x.device),
    )  # fmt: skip
    return normed, Chances(logits, chosen, normalized)


def add_experts(
    residual: Tensor, x: Tensor, chances: Chances, activation: Activation, up: ExpertStack, down: ExpertStack
) -> bool:
    """residual [1, K] += the weighted results of the experts of x [1, K], if the kernels support the shapes -> whether
    they do. The kernel before is `norm_router`."""
    if activation is not Activation.GATED_SILU:
        return False
    kernels: Any = packed_gemv if isinstance(up.weight, PackedWeight) else dense_gemv
    first, second = _shape_for(up, True, chances.chosen), _shape_for(down, False, chances.chosen)
    if first is None or second is None:
        return False
    hidden = kernels.experts_up(x, up.weight, chances.logits, chances.chosen, chances.normalized, first)
    kernels.experts_down(residual, hidden, down.weight, chances.logits, chances.chosen, second)
    return True


def _shape_for(experts: ExpertStack, gated: bool, chosen: int) -> Shape | None:
    """The shape of a product's programs, or None where the kernel does not serve."""
    if isinstance(experts.weight, PackedWeight):
        return packed_gemv.experts_shape_for(experts.weight, gated, chosen)
    return dense_gemv.experts_shape_for(experts.outputs, experts.inputs, gated, chosen)
