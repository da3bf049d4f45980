"""What a rank computes of a model: a smaller configuration, and which outputs and inputs of which modules it has.

Follows the tables of the model's family, which say how each part is split. Knows modules by name, no tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from services.worker.errors import CheckpointError
from services.worker.models.config import LearnedPositions, ModelConfig
from services.worker.models.family import Family, Part, PartNames, Split
from services.worker.parallel.shards import Shard, Sizes, Span

_WHOLE = {
    Part.ATTENTION_NORM,
    Part.ATTENTION_AFTER_NORM,
    Part.MLP_NORM,
    Part.MLP_AFTER_NORM,
    Part.Q_NORM,
    Part.K_NORM,
    Part.FINAL_NORM,
    Part.POSITIONS,
    Part.ROUTER,
}
"""Parts that each tensor rank has whole."""

_OF_EXPERTS = {Part.EXPERT_UP, Part.EXPERT_DOWN}
_LARGEST_GROUP = 128
"""Inputs that share a scale in the formats that are usual."""


@dataclass(frozen=True, slots=True)
class ModulePiece:
    """What a rank has of a module."""

    name: str
    """The module's name in the rank's model, whose layers and experts are numbered from 0."""
    split: Split
    spans: tuple[Span, ...]
    """Spans of its outputs (COLUMN) or inputs (ROW), one after another; empty if REPLICATED."""
    total: int
    """Outputs or inputs of the whole module; 0 if REPLICATED."""
    transposed: bool
    """The checkpoint stores its weight as [inputs, outputs]."""


def sizes_of(config: ModelConfig, *, quantized: bool) -> Sizes:
    """What of a model is shared out, and what its layers cost. quantized: the weights are in groups or blocks."""
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return Sizes(
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        neurons=config.intermediate_size,
        experts=config.moe.experts if config.moe else 0,
        expert_neurons=config.moe.width if config.moe else 0,
        neuron_unit=_LARGEST_GROUP if quantized else 1,
        vocabulary=config.vocab_size,
        layer_cost=config.hidden_size * (attention + config.up_outputs + config.intermediate_size),
        head_cost=config.hidden_size * config.vocab_size,
    )


def config_of(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The configuration of a rank's part; its vocabulary is that of the whole model."""
    positions, moe, layers = config.positions, config.moe, slice(shard.layers.start, shard.layers.stop)
    own = range(shard.experts.start, shard.experts.stop) if _spreads_experts(config, shard) else None
    if isinstance(positions, LearnedPositions) and not shard.is_first:
        positions = LearnedPositions(0)
    return replace(
        config,
        layers=shard.layers.count,
        heads=shard.heads.count,
        kv_heads=shard.kv_heads.count,
        intermediate_size=shard.neurons.count,
        windows=config.windows[layers],
        moe=None if moe is None else replace(moe, layers=moe.layers[layers], width=shard.expert_neurons.count, own=own),
        positions=positions,
    )


def _spreads_experts(config: ModelConfig, shard: Shard) -> bool:
    """Whether tensor ranks have whole experts, and not some neurons of each."""
    return config.moe is not None and shard.experts.count < config.moe.experts


def table_rows(config: ModelConfig, shard: Shard) -> tuple[int, int]:
    """Rows of the vocabulary in a rank's embedding and in its head."""
    rows = shard.vocabulary.count
    if config.tied_embeddings:
        rows = rows if shard.is_first or shard.is_last else 0
        return rows, rows
    return rows if shard.is_first else 0, rows if shard.is_last else 0


def pieces_of(family: Family, config: ModelConfig, shard: Shard) -> Mapping[str, ModulePiece]:
    """What a rank has of each module of a checkpoint of the whole model, by the module's name there. Modules of which
    it has nothing are left out. Raises CheckpointError for parts that cannot be split."""
    embeds, heads = table_rows(config, shard)
    held = {Part.EMBEDDING: embeds > 0, Part.HEAD: heads > 0 and not config.tied_embeddings}
    held |= {Part.POSITIONS: shard.is_first}
    pieces: dict[str, ModulePiece] = {}
    for names in family.outside:
        if held.get(names.part, True):
            pieces.update(_modules(names, config, shard, 0, 0))
    for local, layer in enumerate(range(shard.layers.start, shard.layers.stop)):
        for names in family.layer:
            experts = shard.experts if names.part in _OF_EXPERTS else Span(0, 1)
            for own, expert in enumerate(range(experts.start, experts.stop)):
                pieces.update(_modules(names, config, shard, layer, local, expert, own))
    return pieces


def _modules(
    names: PartNames, config: ModelConfig, shard: Shard, layer: int, local: int, expert: int = 0, own_expert: int = 0
) -> Iterator[tuple[str, ModulePiece]]:
    """local, own_expert: the numbers of the layer and the expert in the rank's model."""
    spans, total = _spans(names.part, config, shard)
    is_whole = shard.ranks == 1 or (names.part in _OF_EXPERTS and _spreads_experts(config, shard))
    split = Split.REPLICATED if is_whole else names.split
    for index, module in enumerate(names.modules):
        name, own, whole = module.format(layer=local, expert=own_expert), spans, total
        if len(names.modules) > 1 and spans:  # Each module has one of the spans, which count from its own beginning.
            offset = _offsets(names.part, config)[index]
            own, whole = (
                (Span(spans[index].start - offset, spans[index].stop - offset),),
                _outputs(names.part, config)[index],
            )
        if split is Split.REPLICATED:
            own, whole = (), 0
        yield module.format(layer=layer, expert=expert), ModulePiece(name, split, own, whole, names.transposed)


def _outputs(part: Part, config: ModelConfig) -> tuple[int, ...]:
    """Outputs that are split each for themselves: of queries, keys and values, or of gate and up."""
    if part is Part.QKV:
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return q, kv, kv
    return (_width(part, config),) * (2 if config.activation.is_gated else 1)


def _width(part: Part, config: ModelConfig) -> int:
    """Neurons of the MLP or of an expert."""
    return config.moe.width if config.moe and part in _OF_EXPERTS else config.intermediate_size


def _offsets(part: Part, config: ModelConfig) -> list[int]:
    sizes = _outputs(part, config)
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _spans(part: Part, config: ModelConfig, shard: Shard) -> tuple[tuple[Span, ...], int]:
    """The rank's outputs or inputs of a part, and how many the whole part has."""
    dim = config.head_dim
    if part in (Part.EMBEDDING, Part.HEAD):
        return (shard.vocabulary,), config.vocab_size
    if part is Part.QKV:
        q, k, v = _offsets(part, config)
        heads, kv_heads = shard.heads, shard.kv_heads
        return (heads.times(dim, q), kv_heads.times(dim, k), kv_heads.times(dim, v)), sum(_outputs(part, config))
    neurons = shard.expert_neurons if part in _OF_EXPERTS else shard.neurons
    if part in (Part.UP, Part.EXPERT_UP):
        return tuple(neurons.times(1, at) for at in _offsets(part, config)), sum(_outputs(part, config))
    if part is Part.OUTPUT:
        return (shard.heads.times(dim),), config.heads * dim
    if part in (Part.DOWN, Part.EXPERT_DOWN):
        return (neurons,), _width(part, config)
    if shard.ranks > 1 and part not in _WHOLE:
        raise CheckpointError(f"{part.name.lower()} of {config.architecture} cannot be shared by tensor ranks yet")
    return (), 0
