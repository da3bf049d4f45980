"""Unstructured and 2:4 pruning: the weights that matter least become zero, and the rest learns to do without them.

A weight matters by its size, or by its size times that of its input (Wanda, Sun et al., arXiv:2306.11695).

Legend: N outputs, K inputs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress import dense, text
from compress.checkpoint import Workbench
from compress.choices import Pattern
from compress.network import LINEARS, SEEN, Seen, Stream, layers_of, linear, load
from compress.progress import Progress
from compress.training import Plan, distillation, train


@dataclass(frozen=True, slots=True)
class Judgement:
    """Which weights matter, and how many stay."""

    sparsity: float = 0.5
    pattern: Pattern = Pattern.UNSTRUCTURED
    wanda: bool = True
    """Whether inputs count, or the weight's size alone."""


def prune(base: Path, out: Path, windows_WT: Tensor, judgement: Judgement, heal: Plan, progress: Progress) -> None:
    """Prune layer after layer, then heal: the base teaches what is left. No `heal.steps` leaves it as it is."""
    model = load(base)
    settings = {"method": "prune", **asdict(judgement), **asdict(heal), "text": text.described(windows_WT)}
    bench = Workbench(base, out, settings, dense.pieces(model))
    masks = bench.kept("masks")
    if masks is None:
        masks = _masks(model, windows_WT[:SEEN], judgement, progress)
        bench.keep("masks", masks)
    zero = _zeroing(model, masks)
    zero()
    if heal.steps:
        train(model, windows_WT, distillation(model, load(base)), heal, bench, progress, after_step=zero)
    dense.write(model, base, bench)


def _masks(model: PreTrainedModel, windows_WT: Tensor, judgement: Judgement, progress: Progress) -> dict[str, Tensor]:
    """True where a weight stays, by the weight's name. Each layer is judged by what the pruned ones before it say."""
    stream, masks = Stream(model, windows_WT), {}
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        progress("layers", index, len(layers))
        seen = stream.look(index) if judgement.wanda else None
        for name in LINEARS:
            weight = linear(layer, name).weight
            mask = keep(_worth(weight.detach(), seen, name), judgement.sparsity, judgement.pattern)
            weight.data.mul_(mask)
            masks[f"model.layers.{index}.{name}.weight"] = mask
        stream.advance(index)
    progress("layers", len(layers), len(layers))
    return masks


def keep(worth_NK: Tensor, sparsity: float, pattern: Pattern) -> Tensor:
    """bool [N, K]: the weights that stay."""
    if pattern is Pattern.TWO_OF_FOUR:
        fours = worth_NK.reshape(len(worth_NK), -1, 4)
        return (
            torch.zeros_like(fours, dtype=torch.bool).scatter_(2, fours.topk(2, dim=2).indices, True).view_as(worth_NK)
        )
    stays = worth_NK.shape[1] - round(worth_NK.shape[1] * sparsity)
    return torch.zeros_like(worth_NK, dtype=torch.bool).scatter_(1, worth_NK.topk(stays, dim=1).indices, True)


def _worth(weight_NK: Tensor, seen: Seen | None, name: str) -> Tensor:
    return weight_NK.abs() if seen is None else weight_NK.abs() * seen.inputs[name].gram.diagonal().sqrt()


def _zeroing(model: PreTrainedModel, masks: dict[str, Tensor]) -> Callable[[], None]:
    weights = dict(model.named_parameters())

    def zero() -> None:
        with torch.no_grad():
            for name in masks:
                masks[name] = masks[name].to(weights[name].device)
                weights[name].mul_(masks[name])

    return zero
