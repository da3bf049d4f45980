"""GPTQ: rounds column by column; the remaining columns compensate each error (arXiv:2210.17323).

Each group's range is clipped where that reduces the error; at the end all scales are refitted to the rounded numbers.

Legend: N outputs, K inputs, B groups of a row, G inputs of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compress.base.columns import Change, change_columns, damped
from compress.base.linears import READERS
from compress.base.network import LayerStats, Moments, linear
from compress.quantize import layout
from compress.quantize.recipe import Recipe, Rounded
from compress.quantize.rounding import Steps, cheapest_steps, grouped, int4_weight
from kernels.quantized_weights import INT4_ZERO, Int4Weight


@dataclass(frozen=True, slots=True)
class Gptq(Recipe):
    """4-bit weights in groups of inputs."""

    group: int = 64
    symmetric: bool = True
    act_order: bool = False
    """Round columns with the largest moments first. Groups keep the inputs' order, so readers are not affected."""
    calibrated = True

    @property
    def scheme(self) -> layout.Scheme:
        """pack-quantized."""
        return layout.int4(self.group, symmetric=self.symmetric, act_order=self.act_order)

    def round(self, layer: nn.Module, seen: LayerStats | None, /) -> Rounded:
        """Round each linear by its inputs' second moments."""
        assert seen is not None
        return Rounded(round_together(layer, seen.inputs, self.group, self.symmetric, self.act_order))


def round_together(
    layer: nn.Module, inputs: Mapping[str, Moments], group: int, symmetric: bool, act_order: bool
) -> dict[str, Int4Weight]:
    """Round all linears of a layer. Linears with the same inputs are rounded together, since rows are independent."""
    weights = {}
    for names in READERS.values():
        parts = [linear(layer, name).weight.detach() for name in names]
        weight, gram = torch.cat(parts), inputs[names[0]].gram
        worth_BG = gram.diagonal().view(-1, group)
        fixed = cheapest_steps(grouped(weight, group), symmetric, worth_BG) if act_order else None
        rounded, begin = refitted(compensated(weight, gram, group, symmetric, fixed), weight, gram), 0
        for name, part in zip(names, parts, strict=True):
            weights[name] = rounded.rows(begin, begin + len(part))
            begin += len(part)
    return weights


def compensated(weight_NK: Tensor, gram_KK: Tensor, group: int, symmetric: bool, fixed: Steps | None) -> Int4Weight:
    """Round column by column; later columns compensate each error as far as their inputs are correlated.

    With `fixed` steps the inputs with the largest moments come first (act-order); else columns come in their own order,
    and a group's steps are found when its turn comes.
    """
    inputs = torch.arange(len(gram_KK), device=gram_KK.device)
    order = inputs if fixed is None else gram_KK.diagonal().argsort(descending=True)
    found: list[Steps] = []

    def rounding(columns: slice, weight_NG: Tensor) -> Change:
        if fixed is None:
            found.append(cheapest_steps(weight_NG[:, None], symmetric, gram_KK.diagonal()[columns][None]))
            steps = found[-1].of(torch.zeros(group, dtype=torch.long, device=order.device))
        else:
            steps = fixed.of(order[columns] // group)
        return lambda column, now: steps.of(slice(column, column + 1)).rounded(now[:, None, None]).flatten()

    changed_NK = change_columns(weight_NK[:, order], gram_KK[order][:, order], group, rounding)[:, order.argsort()]
    steps = fixed or Steps.joined(found)
    return int4_weight(steps.nearest(grouped(changed_NK, group)), steps, symmetric)


def refitted(rounded: Int4Weight, weight_NK: Tensor, gram_KK: Tensor) -> Int4Weight:
    """The same integers with refitted scales: least squares over the outputs, all groups of a row at once. A scale that
    would change by more than a factor of 2 stays: its group hardly affects the output."""
    gram_KK = damped(gram_KK).float()
    zero = INT4_ZERO if rounded.zero is None else rounded.zero.float()[..., None]
    q_NBG = grouped(rounded.unpack().float(), rounded.group) - zero
    wanted_NB = (grouped(weight_NK @ gram_KK, rounded.group) * q_NBG).sum(2)
    products_NBB = torch.stack(
        [
            (grouped(q_NBG[:, group] @ rows_GK, rounded.group) * q_NBG).sum(2)
            for group, rows_GK in enumerate(torch.split(gram_KK, rounded.group))
        ],
        dim=1,
    )
    products_NBB.diagonal(dim1=1, dim2=2).clamp_min_(1e-8)
    scale, old = torch.linalg.solve(products_NBB, wanted_NB), rounded.scale.float()
    usable = (scale > old / 2) & (scale < old * 2)
    return replace(rounded, scale=torch.where(usable, scale, old).to(rounded.scale.dtype))
