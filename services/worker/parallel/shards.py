"""A rank's share of a model: layers, heads, neurons, experts and rows of the vocabulary. Knows counts, no tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.errors import CheckpointError
from services.worker.parallel.topology import Grid


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many."""
        return self.stop - self.start

    def times(self, width: int, offset: int = 0) -> "Span":
        """The span of numbers where each of these is `width` wide, behind `offset` others."""
        return Span(offset + self.start * width, offset + self.stop * width)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model is shared out."""

    layers: int
    heads: int
    kv_heads: int
    neurons: int
    """Neurons of the MLP."""
    experts: int
    """Experts of a layer; 0: the model has none."""
    expert_neurons: int
    """Neurons of each expert; 0: the model has no experts."""
    neuron_unit: int
    """Neurons that stay together, a power of two: those of a group or block of a quantized weight. Fewer if there are
    too few for all ranks."""
    vocabulary: int
    layer_cost: float
    head_cost: float
    """Cost of the product with the vocabulary, in the unit of `layer_cost`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share."""

    layers: Span
    heads: Span
    kv_heads: Span
    """Ranks beyond the number of key/value heads have copies of one."""
    neurons: Span
    experts: Span
    """All experts, unless the grid spreads whole ones."""
    expert_neurons: Span
    """Neurons of each of these experts: all of them, or shared as those of the MLP are."""
    vocabulary: Span
    is_first: bool
    """Whether the rank is of the first stage, which embeds tokens."""
    is_last: bool
    """Whether the rank is of the last stage, which samples."""
    ranks: int
    """Tensor ranks of each stage."""


def shard_of(sizes: Sizes, grid: Grid, rank: int) -> Shard:
    """The share of a rank. Raises CheckpointError if the model cannot be shared out so."""
    _check(sizes, grid)
    place, ranks = grid.place(rank), grid.tensor
    if sizes.kv_heads >= ranks:
        kv_heads = share(sizes.kv_heads, ranks, place.tensor)
    else:
        copied = place.tensor * sizes.kv_heads // ranks
        kv_heads = Span(copied, copied + 1)
    experts, expert_neurons = Span(0, sizes.experts), _neurons(sizes.expert_neurons, sizes, ranks, place.tensor)
    if grid.spreads_experts:
        experts, expert_neurons = share(sizes.experts, ranks, place.tensor), Span(0, sizes.expert_neurons)
    return Shard(
        layers=stages(sizes, grid.pipeline)[place.stage],
        heads=share(sizes.heads, ranks, place.tensor),
        kv_heads=kv_heads,
        neurons=_neurons(sizes.neurons, sizes, ranks, place.tensor),
        experts=experts,
        expert_neurons=expert_neurons,
        vocabulary=share(sizes.vocabulary, ranks, place.tensor),
        is_first=place.stage == 0,
        is_last=grid.is_last(rank),
        ranks=ranks,
    )


def share(total: int, parts: int, index: int) -> Span:
    """One of `parts` parts, as equal as can be."""
    return Span(index * total // parts, (index + 1) * total // parts)


def _neurons(total: int, sizes: Sizes, ranks: int, index: int) -> Span:
    unit = math.gcd(total, sizes.neuron_unit)
    while unit > 1 and total // unit < ranks:
        unit //= 2
    return share(total // unit, ranks, index).times(unit) if total else Span(0, 0)


def stages(sizes: Sizes, count: int) -> list[Span]:
    """The layers of each stage: at least one, and the most expensive stage is as cheap as can be. The last one has the
    product with the vocabulary, too."""
    costs = [sizes.layer_cost] * sizes.layers
    costs[-1] += sizes.head_cost
    return cut(costs, count)


def cut(costs: Sequence[float], count: int) -> list[Span]:
    """Cut a row of costs into `count` spans whose largest sum is the least; of equals, earlier spans are longer."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[list[tuple[float, int]]] = [[(sums[end], 0) for end in range(len(sums))]]
    for part in range(1, count):
        row = [(float("inf"), 0)] * len(sums)
        for end in range(part + 1, len(sums)):
            row[end] = min((max(best[-1][at][0], sums[end] - sums[at]), -at) for at in range(part, end))
        best.append([(worst, -at) for worst, at in row])
    spans, end = [], len(costs)
    for part in range(count - 1, -1, -1):
        start = best[part][end][1]
        spans.append(Span(start, end))
        end = start
    return spans[::-1]


def _check(sizes: Sizes, grid: Grid) -> None:
    ranks = grid.tensor
    if sizes.heads % ranks:
        raise CheckpointError(f"{sizes.heads} attention heads cannot be shared by {ranks} tensor ranks")
    if sizes.kv_heads % ranks and ranks % sizes.kv_heads:
        raise CheckpointError(f"{sizes.kv_heads} key/value heads cannot be shared by {ranks} tensor ranks")
    if grid.spreads_experts and not sizes.experts:
        raise CheckpointError("WEFT_EXPERT_PARALLEL: the model has no experts")
    if grid.spreads_experts and sizes.experts < ranks:
        raise CheckpointError(f"{sizes.experts} experts cannot be spread over {ranks} tensor ranks")
    expert_neurons = 0 if grid.spreads_experts else sizes.expert_neurons
    if min(total for total in (sizes.neurons, expert_neurons, sizes.vocabulary) if total) < ranks:
        raise CheckpointError(f"the model is too small for {ranks} tensor ranks")
    if sizes.layers < grid.pipeline:
        raise CheckpointError(f"{sizes.layers} layers cannot be shared by {grid.pipeline} pipeline stages")
