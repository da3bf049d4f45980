"""Norms, activations, products and rotation in plain torch. Names as in `kernels.reference`; knows no context."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import kv_pages
from kernels.operands import Activation, Norm, NormKind

# ---- norms and activations ----


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019). x [..., n], weight [n] or [..., n]."""
    if weight.dtype != x.dtype:
        return rms_norm(x.to(weight.dtype), weight, eps).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """The norm over the last dimension of x."""
    if norm.kind is NormKind.RMS:
        return rms_norm(x, norm.weight, norm.eps)
    return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x [..., m]: [..., m], or [..., m / 2] if it is gated."""
    if activation is Activation.GATED_SILU:
        return silu_and_mul(x)
    if activation is Activation.GATED_GELU_TANH:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
    return F.gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")


# torch computes the last numbers of a tensor one by one where they do not fill its vectors, and other bits come out.
# Rows of whole vectors, two at a time, have none of them, whatever the dtype.
VECTOR_NUMBERS = 64


def activate_invariant(x: Tensor, activation: Activation) -> Tensor:
    """As `activate` of x [T, m], and a row's result has the same bits whatever the other rows are and however many."""
    width = x.shape[1]
    if activation is Activation.GATED_GELU_TANH:
        gate, up = x.chunk(2, dim=1)
        return activate_invariant(gate.contiguous(), Activation.GELU_TANH).mul(up)
    if activation is Activation.GATED_SILU or width % VECTOR_NUMBERS == 0:  # the halves of a row are no whole tensor
        return activate(x, activation)
    return activate(F.pad(x, (0, -width % VECTOR_NUMBERS)), activation)[:, :width]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension: [T, 2n] -> [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


# ---- matrix products ----


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x [T, n], weight [m, n], bias [m] -> [T, m]."""
    return F.linear(x, weight, bias)


# The BLAS library uses another summation order for few rows (in fp32 one row alone and the same row among 64 differ in
# 90% of their elements) and, with several threads and sums over 1024 or more, for each number of rows. A fixed shape
# has one order: in tiles of 16 rows a row's bits depend neither on its position nor on the other rows (torch 2.13, for
# a given number of threads).
ROW_TILE = 16


def matmul_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x [T, n], weight [m, n] -> [T, m]; a row's bits do not depend on the other rows."""
    rows = x.shape[0]
    padded = _pad_rows(x, ROW_TILE)
    if padded.shape[0] == ROW_TILE:
        return F.linear(padded, weight, bias)[:rows]
    out = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], ROW_TILE):
        out[start : start + ROW_TILE] = F.linear(padded[start : start + ROW_TILE], weight, bias)
    return out[:rows]


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[0] % multiple
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


# ---- rotary embedding and KV write ----


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_NP2KD: Tensor,
    slot_mapping_T: Tensor,
    heads: int,
    kv_heads: int,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys (Su et al. 2021, the halves convention), write keys and values, return the queries.

    qkv [T, H + 2K, D], the heads in this order. cos, sin [T, 1, D]; the first half of sin is negated. slot_mapping_T
    int64: slot of each token's key and value, block * P + offset. kv_scales: as in `kv_pages.store`. -> q [T, H, D].
    """
    dim = qkv.shape[2]
    rotated = heads + kv_heads
    qk = qkv[:, :rotated]
    low, high = qk[..., : dim // 2], qk[..., dim // 2 :]
    swapped = torch.cat((high, low), dim=-1).mul_(sin)
    qk.mul_(cos).add_(swapped)
    kv_pages.store(kv_NP2KD, slot_mapping_T, qkv[:, heads:], kv_scales)
    return qkv[:, :heads]


# ---- checks ----


def finite_rows(x: Tensor, lengths: Sequence[int]) -> list[bool]:
    """Whether all numbers of each row are finite. x [T, n]; a row is `length` consecutive lines of x."""
    if bool(torch.isfinite(x.sum())):  # nearly always true; otherwise the rows are checked one by one
        return [True] * len(lengths)
    lines = torch.isfinite(x).all(dim=-1)
    return [bool(part.all()) for part in torch.split(lines, list(lengths))]
