"""Changes a weight column by column; the remaining columns compensate the error of each change (arXiv:2210.17323).

Rounding (`compress.quantize.gptq`) and pruning (`compress.prune.sparse`, as SparseGPT, arXiv:2301.00774) are such
changes; where whole columns go (`compress.prune.shrink`), those that stay are fitted at one go.

Legend: N outputs, K inputs, G inputs of a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_DAMPING = 0.01
"""Share of the mean of the moments' diagonal that is added to the diagonal."""
Change = Callable[[int, Tensor], Tensor]
"""(index of a column in its block, column [N]) -> changed column [N]."""


def change_columns(
    weight_NK: Tensor, gram_KK: Tensor, block: int, change_of: Callable[[slice, Tensor], Change]
) -> Tensor:
    """The weight with all columns changed in turn; each column first compensates the errors of those before it.

    `gram_KK`: the inputs' second moments, which say how far columns go together. `change_of` is asked once for each
    block of columns, with the block as it has become.
    """
    weight_NK, factor_KK = weight_NK.clone(), _inverse_factor(gram_KK)
    changed_NK = torch.empty_like(weight_NK)
    for begin in range(0, weight_NK.shape[1], block):
        columns, later = slice(begin, begin + block), slice(begin + block, None)
        weight_NG, factor_GG = weight_NK[:, columns], factor_KK[columns, columns]
        change, errors_NG = change_of(columns, weight_NG), torch.empty_like(weight_NG)
        for column in range(weight_NG.shape[1]):
            now, after = weight_NG[:, column], slice(column + 1, None)
            changed_NK[:, begin + column] = change(column, now)
            errors_NG[:, column] = (now - changed_NK[:, begin + column]) / factor_GG[column, column]
            weight_NG[:, after] -= torch.outer(errors_NG[:, column], factor_GG[column, after])
        weight_NK[:, later] -= errors_NG @ factor_KK[columns, later]
    return changed_NK


def keep_columns(weight_NK: Tensor, gram_KK: Tensor, stays: Tensor) -> Tensor:
    """The columns that stay, refitted by least squares to reproduce the outputs of all columns."""
    moments_KK = damped(gram_KK)
    wanted = weight_NK.double() @ moments_KK[:, stays]
    fitted: Tensor = torch.linalg.solve(moments_KK[stays][:, stays], wanted, left=False)
    return fitted.to(weight_NK.dtype)


def damped(gram_KK: Tensor) -> Tensor:
    """The moments in float64 with a damped diagonal, so that they can be inverted."""
    share = (gram_KK.diagonal().mean() * _DAMPING).clamp_min(1e-8)
    return gram_KK.double() + torch.eye(len(gram_KK), device=gram_KK.device) * share


def _inverse_factor(gram_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(gram_KK)))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
