"""Routing and mixing of experts in plain torch. Knows tensors, never layers or devices.

T tokens    E experts of a layer    k experts that compute a token
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantized_weights import Weight, dequantize


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts compute which tokens. Entry t * k + i is the i-th choice of token t."""

    weights_Tk: Tensor
    """float32 [T, k]: by which the results are multiplied."""
    order: Tensor
    """[T * k]: the entries by expert; those of one expert in their order."""
    offsets: Tensor
    """[E + 1]: the first entry of each expert in `order`, and T * k."""


def route(logits_TE: Tensor, chosen: int, normalized: bool) -> Routes:
    """The `chosen` likeliest experts of each token, the lower number among equals.

    Their weights are those of the softmax over all experts; normalized: divided by their sum.
    """
    chances, ids = torch.sort(logits_TE.float().softmax(dim=-1), dim=-1, descending=True, stable=True)
    weights, ids = chances[:, :chosen], ids[:, :chosen]
    if normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=logits_TE.shape[1])
    return Routes(weights.contiguous(), order, torch.cat((counts.new_zeros(1), counts.cumsum(0))))


def multiply(x: Tensor, weights: Sequence[Weight], routes: Routes, *, divide: int) -> Tensor:
    """For each entry e of the routes, x[e // divide] times the weight [n, m] of its expert: [T * k, n]."""
    out = x.new_empty(len(routes.order), weights[0].shape[0])
    offsets = routes.offsets.tolist()
    for weight, first, last in zip(weights, offsets, offsets[1:], strict=False):
        entries = routes.order[first:last].long()
        out[entries] = x[entries // divide] @ dequantize(weight, x.dtype).t()
    return out


def add_weighted(residual: Tensor, results: Tensor, weights_Tk: Tensor) -> None:
    """residual [T, n] += the results [T * k, n] of each token's entries, weighted, one after the other."""
    tokens, chosen = weights_Tk.shape
    weighted = results.view(tokens, chosen, -1).mul_(weights_Tk.to(results.dtype)[:, :, None])
    for part in weighted.unbind(1):
        residual.add_(part)
