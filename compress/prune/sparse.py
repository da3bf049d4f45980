"""Unstructured and 2:4 pruning: the least important weights become zero; the others compensate and are trained.

A weight matters by its size, or by its size times that of its input (Wanda, Sun et al., arXiv:2306.11695). Columns make
up for what went from those before them (SparseGPT, Frantar and Alistarh, arXiv:2301.00774).

Legend: N outputs, K inputs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress import text
from compress.base.columns import Change, change_columns
from compress.base.linears import LINEARS
from compress.base.network import SEEN, Stream, layers_of, linear, load, on_device
from compress.choices import Pattern
from compress.errors import CompressError
from compress.output import dense
from compress.output.checkpoint import Workspace
from compress.progress import Progress
from compress.training.run import Plan, distillation, train

_BLOCK = 128
"""Columns that are scored at a time."""


@dataclass(frozen=True, slots=True)
class PruneScore:
    """How weights are scored, and how many stay."""

    sparsity: float = 0.5
    pattern: Pattern = Pattern.UNSTRUCTURED
    wanda: bool = True
    """Score by weight times input norm (Wanda); otherwise by magnitude."""
    compensate: bool = True
    """Remaining weights compensate the removed ones before them."""


def prune(base: Path, out: Path, windows_WT: Tensor, score: PruneScore, heal: Plan, progress: Progress) -> None:
    """Prune layer by layer, then train the result with the base as teacher, unless `heal.steps` is 0.

    Raises CompressError.
    """
    model = load(base)
    if score.pattern is Pattern.TWO_OF_FOUR and any(
        linear(layers_of(model)[0], name).in_features % 4 for name in LINEARS
    ):
        raise CompressError(f"2:4 needs linears whose inputs are multiples of 4; those of {base} are not")
    settings = {"method": "prune", **asdict(score), **asdict(heal), "text": text.described(windows_WT)}
    workspace = Workspace(base, out, settings, dense.pieces(model))
    pruned = workspace.kept("pruned")
    if pruned is None:
        pruned = _pruned(model, windows_WT[:SEEN], score, progress)
        workspace.keep("pruned", pruned)
    for name, weight in pruned.items():
        model.get_parameter(name).data.copy_(weight)
    if heal.steps:
        zero = _zeroing(model, {name: weight != 0 for name, weight in pruned.items()})
        train(model, windows_WT, distillation(model, load(base)), heal, workspace, progress, after_step=zero)
    dense.write(model, base, workspace)


def _pruned(model: PreTrainedModel, windows_WT: Tensor, score: PruneScore, progress: Progress) -> dict[str, Tensor]:
    """Linear name -> pruned weight. Each layer is scored on the outputs of the pruned layers before it."""
    stream, pruned = Stream(model, windows_WT), dict[str, Tensor]()
    for index, layer in enumerate(stream.layers):
        progress("layers", index, len(stream.layers))
        with on_device(layer):
            seen = stream.look(index)
            for name in LINEARS:
                weight = linear(layer, name).weight.data
                weight.copy_(_prune(weight, seen.inputs[name].gram, score))
            stream.advance(index)
        pruned |= {f"model.layers.{index}.{name}.weight": linear(layer, name).weight.data for name in LINEARS}
    progress("layers", len(stream.layers), len(stream.layers))
    return pruned


def _prune(weight_NK: Tensor, gram_KK: Tensor, score: PruneScore) -> Tensor:
    """The pruned weight; each block is scored after the errors of the blocks before it were compensated."""
    sizes_K = gram_KK.diagonal().sqrt() if score.wanda else torch.ones_like(gram_KK[0])

    def zeroing(columns: slice, weight_NG: Tensor) -> Change:
        stays_NG = keep(weight_NG.abs() * sizes_K[columns], score.sparsity, score.pattern)
        return lambda column, now: now * stays_NG[:, column]

    if score.compensate:
        return change_columns(weight_NK, gram_KK, _BLOCK, zeroing)
    return weight_NK * keep(weight_NK.abs() * sizes_K, score.sparsity, score.pattern)


def keep(worth_NK: Tensor, sparsity: float, pattern: Pattern) -> Tensor:
    """bool [N, K]: the weights that stay."""
    if pattern is Pattern.TWO_OF_FOUR:
        fours = worth_NK.reshape(len(worth_NK), -1, 4)
        return (
            torch.zeros_like(fours, dtype=torch.bool).scatter_(2, fours.topk(2, dim=2).indices, True).view_as(worth_NK)
        )
    stays = worth_NK.shape[1] - round(worth_NK.shape[1] * sparsity)
    return torch.zeros_like(worth_NK, dtype=torch.bool).scatter_(1, worth_NK.topk(stays, dim=1).indices, True)


def _zeroing(model: PreTrainedModel, masks: dict[str, Tensor]) -> Callable[[], None]:
    weights = dict(model.named_parameters())

    def zero() -> None:
        with torch.no_grad():
            for name in masks:
                masks[name] = masks[name].to(weights[name].device)
                weights[name].mul_(masks[name])

    return zero
