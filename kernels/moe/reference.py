"""Routing and mixing of experts in plain torch. Knows tensors, never layers or devices.

T tokens    E experts of a layer    k experts that compute a token    O of the E experts are own: their weights are here
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
    """float32 [T, k]: by which the results are multiplied; 0 for entries of experts that are not own."""
    order: Tensor
    """[T * k]: the entries of own experts by expert, those of one expert in their order; behind them any numbers."""
    offsets: Tensor
    """[O + 1]: the first entry of each own expert in `order`, and the end of the last one's."""
    experts: int
    """E."""

    @property
    def own(self) -> int:
        """O."""
        return len(self.offsets) - 1


def route(logits_TE: Tensor, chosen: int, normalized: bool, own: range | None = None) -> Routes:
    """The `chosen` likeliest experts of each token, the lower number among equals.

    Their weights are those of the softmax over all experts; normalized: divided by their sum. own: the numbers of the
    own experts, consecutive ones; None: all.
    """
    experts = logits_TE.shape[1]
    own = range(experts) if own is None else own
    chances, ids = torch.sort(logits_TE.float().softmax(dim=-1), dim=-1, descending=True, stable=True)
    weights, ids = chances[:, :chosen], ids[:, :chosen]
    if normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if len(own) < experts:
        is_own = (ids >= own.start) & (ids < own.stop)
        weights, ids = weights * is_own, torch.where(is_own, ids - own.start, len(own))
    places = ids.flatten()
    order = places.argsort(stable=True)
    counts = torch.bincount(places, minlength=len(own))[: len(own)]
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return Routes(weights.contiguous(), order, offsets, experts)


def multiply(x: Tensor, weights: Sequence[Weight], routes: Routes, *, divide: int) -> Tensor:
    """For each entry e of the routes, x[e // divide] times the weight [n, m] of its expert: [T * k, n]. weights: those
    of own experts; the rows of the others are 0."""
    out = x.new_zeros(len(routes.order), weights[0].shape[0])
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
