"""GPTQ: round column after column, each time making up for the error in the columns that are left (arXiv:2210.17323).

Each group's range is cut where that costs least, and at the end all scales are fitted anew to the numbers found.

Legend: N outputs, K inputs, B groups of a row, G inputs of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compress import layout
from compress.network import READERS, Moments, Seen, linear
from compress.recipe import Recipe, Rounded
from compress.rounding import Steps, cheapest_steps, grouped, int4_weight
from kernels.quantized import INT4_ZERO, Int4Weight

_DAMPING = 0.01
"""Added to the moments' diagonal, as a share of its mean."""


@dataclass(frozen=True, slots=True)
class Gptq(Recipe):
    """Weights of 4 bits in groups of inputs."""

    group: int = 64
    symmetric: bool = True
    act_order: bool = False
    """Round the inputs with the largest moments first. Groups stay as they are, so readers need not know of it."""
    calibrated = True

    @property
    def scheme(self) -> layout.Scheme:
        """pack-quantized."""
        return layout.int4(self.group, symmetric=self.symmetric, act_order=self.act_order)

    def round(self, layer: nn.Module, seen: Seen | None, /) -> Rounded:
        """Each linear by its inputs' second moments."""
        assert seen is not None
        return Rounded(round_together(layer, seen.inputs, self.group, self.symmetric, self.act_order))


def round_together(
    layer: nn.Module, inputs: Mapping[str, Moments], group: int, symmetric: bool, act_order: bool
) -> dict[str, Int4Weight]:
    """All linears of a layer; those that read the same inputs at one go, for a row knows nothing of other rows."""
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
    """Round column after column; what each is off, the columns after it make up for as far as inputs go together.

    With `fixed` steps the inputs with the largest moments come first (act-order); else columns come in their own order,
    and a group's steps are found when its turn comes.
    """
    inputs = weight_NK.shape[1]
    order = torch.arange(inputs) if fixed is None else gram_KK.diagonal().argsort(descending=True)
    weight_NK, factor_KK = weight_NK[:, order], _inverse_factor(gram_KK[order][:, order])
    q_NK, found = torch.empty_like(weight_NK), []
    for begin in range(0, inputs, group):
        columns = slice(begin, begin + group)
        if fixed is None:
            found.append(cheapest_steps(weight_NK[:, None, columns], symmetric, gram_KK.diagonal()[columns][None]))
            steps = found[-1].of(torch.zeros(group, dtype=torch.long))
        else:
            steps = fixed.of(order[columns] // group)
        errors = _round_columns(weight_NK[:, columns], steps, factor_KK[columns, columns], q_NK[:, columns])
        weight_NK[:, begin + group :] -= errors @ factor_KK[columns, begin + group :]
    q_NBG = grouped(q_NK[:, order.argsort()], group)
    return int4_weight(q_NBG, fixed or Steps.joined(found), symmetric)


def refitted(rounded: Int4Weight, weight_NK: Tensor, gram_KK: Tensor) -> Int4Weight:
    """The same whole numbers with the scales that bring their outputs nearest: least squares, all groups of a row at
    once. A scale that would leave the range from half to twice what it was stays: its group hardly speaks."""
    gram_KK = gram_KK + torch.eye(len(gram_KK)) * _damping(gram_KK)
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


def _round_columns(weight_NG: Tensor, steps: Steps, factor_GG: Tensor, q_NG: Tensor) -> Tensor:
    """Round columns in turn into `q_NG`, each with its own steps. -> errors [N, G], each over its factor."""
    errors = torch.empty_like(weight_NG)
    for column in range(weight_NG.shape[1]):
        now, scale, zero = weight_NG[:, column], steps.scale[:, column, 0], steps.zero[:, column, 0]
        q_NG[:, column] = (now / scale + zero).round_().clamp_(0, 15)
        errors[:, column] = (now - (q_NG[:, column] - zero) * scale) / factor_GG[column, column]
        weight_NG[:, column + 1 :] -= torch.outer(errors[:, column], factor_GG[column, column + 1 :])
    return errors


def _inverse_factor(gram_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments."""
    damped = gram_KK.double() + torch.eye(len(gram_KK)) * _damping(gram_KK)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _damping(gram_KK: Tensor) -> Tensor:
    return (gram_KK.diagonal().mean() * _DAMPING).clamp_min(1e-8)
