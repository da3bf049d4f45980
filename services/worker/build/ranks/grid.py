"""Puts a model on a grid of ranks: plans their memory, starts them, loads this process's part. Knows no engine.

Rank 0 is this process. The others are its children: `services.worker.build.ranks.rank`.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from services import host
from services.worker.build import kernel_cache, memory
from services.worker.build.drafting.load import (
    draft_bytes_of_block,
    draft_context,
    load_cpu_draft,
    redoes_guesses,
)
from services.worker.build.engine_parts import EngineParts
from services.worker.build.ranks import rank_process
from services.worker.build.weights import (
    WeightSource,
    bytes_of_block,
    dtype_of,
    free_gpu_bytes,
    open_draft,
    open_source,
    stored_dtype,
)
from services.worker.errors import AnotherRankFailed, CheckpointError
from services.worker.loader.formats.registry import RoundedWeights
from services.worker.loader.sharded import sharded, unknown_tensor, whole_rows
from services.worker.models.adapter_parts import AdapterParts
from services.worker.models.registry import family_of
from services.worker.models.sharding import ModulePiece, config_of, pieces_of, sizes_of
from services.worker.models.stage import StageDecoder
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.parallel import placement
from services.worker.parallel.channel import Channel, Kind
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.shards import Shard, shard_of
from services.worker.parallel.topology import Grid
from services.worker.runners.cpu.adapters import CpuAdapters
from services.worker.runners.cpu.ops import ReferenceOps, plain_ops
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.rank_adapters import RanksAdapters
from services.worker.runners.rank_ops import InvariantRankOps, RankOps
from services.worker.runners.ranks import Rank, RanksRunner
from services.worker.runners.step import MOST_GUESSES

log = structlog.get_logger("worker")
_NOTHING_COMPILED: kernel_cache.Compiling = nullcontext()


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 sends to another rank at its start."""

    rank: int
    folder: str
    options: dict[str, Any]
    meeting: str
    """The file in which ranks meet."""
    blocks: int
    max_length: int
    threads: int
    cores: list[int]
    """What the rank is pinned to; empty: nothing."""

    def write(self) -> bytes:
        """As JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def read(cls, content: bytes) -> "Orders":
        """The inverse of `write`."""
        return cls(**json.loads(content))


def grid_of(options: EngineOptions) -> Grid:
    """The grid that the options ask for."""
    return Grid(options.tensor_parallel, options.pipeline_parallel, options.expert_parallel)


def assemble_grid(
    model_dir: Path,
    source: WeightSource,
    draft: WeightSource | None,
    options: EngineOptions,
    progress: Progress,
    *,
    compile_ahead: bool = False,
) -> EngineParts:
    """Start the ranks, load the model and connect it. draft: that of a draft model, which every rank has whole.
    compile_ahead: as in `assemble`. Raises CheckpointError."""
    grid, config, stored = grid_of(options), source.config, stored_dtype(source.config, options)
    if options.on_gpu and torch.cuda.device_count() < grid.ranks:
        raise CheckpointError(f"{grid} ranks need {grid.ranks} GPUs, torch sees {torch.cuda.device_count()}")
    shards = [_shard(source, grid, rank) for rank in range(grid.ranks)]
    _check_tensors(source, shards)
    sizes = [bytes_of_block(config_of(config, shard), options, stored) for shard in shards]
    planned = None if options.on_gpu else _plan_memory(source, draft, options, sum(sizes))
    threads = options.threads or options.numerics.threads or max(1, torch.get_num_threads() // grid.ranks)
    gpus = _gpus(grid.ranks) if options.on_gpu else []
    cores = placement.cores_of_ranks(grid.ranks, gpus)
    placement.pin(cores[0])
    log.info("ranks", grid=str(grid), placement=placement.describe(cores, gpus), threads=threads)
    compiled = kernel_cache.Marker(config, source.quantization, options)
    compiling: kernel_cache.Compiling = _NOTHING_COMPILED
    if compile_ahead and options.on_gpu:
        spare = free_gpu_bytes() - source.expected_bytes(dtype_of(options), "cuda") // grid.ranks
        compiling = kernel_cache.compiling(model_dir, config, options, compiled, spare)
    channels: list[Channel] = []
    blocks, max_length = planned.kv_blocks if planned else 0, memory.check_length(config, options)
    orders = Orders(0, str(model_dir), _plain(options), _meeting(), blocks, max_length, threads, [])
    try:
        for number in range(1, grid.ranks):
            channels.append(rank_process.start(number))
            channels[-1].send(Kind.BEGIN, replace(orders, rank=number, cores=sorted(cores[number])).write())
        try:
            own, found = load_rank(source, draft, options, orders, progress, compiling)
        except AnotherRankFailed:
            for number, channel in enumerate(channels, 1):
                _ready(number, channel)
            raise
        loaded = [_ready(number, channel) for number, channel in enumerate(channels, 1)]
    except BaseException:
        for channel in channels:
            channel.close()
        raise
    compiled.set()
    runner = RanksRunner(own, channels, sizes, grid, options.max_batch_size, rank_process.end_worker)
    plan = planned or found
    assert plan is not None
    plan = replace(plan, weights=own.nbytes + sum(loaded), kv=sum(sizes) * (plan.kv_blocks + 1))
    numerics = options.numerics.loaded(str(stored).removeprefix("torch."), "")
    layout = numerics.block_layout(options.block_size, config.layers, config.kv_heads, config.head_dim)
    context = draft_context(draft, max_length) if draft is not None else 0
    redo = redoes_guesses(draft, None)
    parts = EngineParts(config, source.parameters, plan, runner, layout, numerics.stored, context, redo)
    if own.adapters is not None:
        cutter = AdapterParts(config, ReferenceOps(), dtype_of(options), shards)
        parts = replace(parts, adapters=RanksAdapters(runner, own.adapters, cutter))
    if not options.on_gpu:
        return parts
    from services.worker.runners.cuda.graphs import most_guesses

    return replace(parts, guess_limit=partial(most_guesses, guesses=MOST_GUESSES))


def _gpus(ranks: int) -> list[str]:
    """The PCI addresses of the ranks' GPUs; none where torch does not know them."""
    found: list[Any] = [torch.cuda.get_device_properties(rank) for rank in range(ranks)]
    if not hasattr(found[0], "pci_domain_id"):
        return []
    return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in found]


def _meeting() -> str:
    """The path of a file in which ranks can meet. On Linux it is in memory: nothing is left of it, however this process
    ends. It stays open as long as the process lives, because stores of torch open it once more when they are freed."""
    if hasattr(os, "memfd_create"):
        return f"/proc/{os.getpid()}/fd/{os.memfd_create('weft-ranks')}"
    return f"{tempfile.mkdtemp(prefix='weft-ranks-')}/meeting"


def load_rank(
    source: WeightSource,
    draft: WeightSource | None,
    options: EngineOptions,
    orders: Orders,
    progress: Progress,
    compiling: kernel_cache.Compiling = _NOTHING_COMPILED,
) -> tuple[Rank, MemoryPlan | None]:
    """Meet the other ranks and load one rank's part -> the rank, and of a GPU the plan of its memory. compiling: fills
    the cache of kernels of all ranks meanwhile. Raises CheckpointError."""
    torch.set_num_threads(orders.threads)
    grid = grid_of(options)
    shard = _shard(source, grid, orders.rank)
    own = own_part(source, shard)
    if options.on_gpu:
        from services.worker.build.ranks.gpu_rank import GpuPlace, load_gpu_rank

        place = GpuPlace(grid, orders.rank, shard, Path(orders.meeting))
        return load_gpu_rank(own, draft, options, place, compiling, progress)
    others = Collectives(grid, orders.rank, Path(orders.meeting))
    ops = _cpu_ops(options, others)
    make: Callable[..., StageDecoder] = partial(StageDecoder, shard=shard, others=others)
    try:
        model = own.load(ops, orders.max_length, options, progress, make)
    except CheckpointError as error:
        expert = f" and expert {shard.experts.start}" if grid.spreads_experts else ""
        raise CheckpointError(f"rank {orders.rank}, from layer {shard.layers.start}{expert} on: {error}") from None
    stored, slots = stored_dtype(source.config, options), options.max_batch_size
    guessing = None
    if draft is not None:
        alone, context = plain_ops(options.deterministic), draft_context(draft, orders.max_length)
        guessing = load_cpu_draft(draft, options, alone, context, orders.blocks, progress)
    adapters = CpuAdapters(model, ops, options.adapter_room) if options.adapter_room else None
    runner = CpuRunner(
        model, ops, orders.blocks, options.block_size, slots, orders.max_length, stored, guessing, adapters
    )
    return Rank(runner, model.nbytes, grid, orders.rank, adapters), None


def _cpu_ops(options: EngineOptions, others: Collectives) -> ReferenceOps:
    """The operations of a rank with these options. Stages alone have no sums."""
    if others.grid.tensor == 1:
        return plain_ops(options.deterministic)
    return InvariantRankOps(others) if options.deterministic else RankOps(others)


def _plan_memory(
    source: WeightSource, draft: WeightSource | None, options: EngineOptions, block_bytes: int
) -> MemoryPlan:
    """The plan of ranks that share the memory of this machine. Raises MemoryShortage."""
    dtype, ranks = dtype_of(options), grid_of(options).ranks
    weights = source.expected_bytes(dtype, "cpu")
    if draft is not None:
        weights += ranks * draft.expected_bytes(dtype, "cpu")
        block_bytes += ranks * draft_bytes_of_block(draft, options)
    available = host.available_memory()
    return memory.plan_memory(source.config, weights, dtype.itemsize, block_bytes, options, available)


def open_own(orders: Orders) -> tuple[WeightSource, WeightSource | None, EngineOptions]:
    """The sources of the model and of the draft model, and the options of a rank that was started. Raises
    CheckpointError."""
    options, folder = EngineOptions.model_validate(orders.options), Path(orders.folder)
    source = open_source(folder, options)
    return source, open_draft(folder, source.config, options), options


def _shard(source: WeightSource, grid: Grid, rank: int) -> Shard:
    return shard_of(sizes_of(source.config, quantized=source.reader is not None), grid, rank)


def own_part(source: WeightSource, shard: Shard) -> WeightSource:
    """The source of a rank's weights."""
    pieces, reader = _pieces(source, shard), source.reader
    rounds = isinstance(reader, RoundedWeights)
    if isinstance(reader, RoundedWeights) and source.checkpoint is not None:
        reader = replace(reader, rows=whole_rows(pieces))
    checkpoint = source.checkpoint and sharded(source.checkpoint, pieces, shard, rounds=rounds)
    return replace(source, checkpoint=checkpoint, reader=reader)


def _pieces(source: WeightSource, shard: Shard) -> dict[str, ModulePiece]:
    return dict(pieces_of(family_of(source.config.architecture), source.config, shard))


def _check_tensors(source: WeightSource, shards: Sequence[Shard]) -> None:
    """Raises CheckpointError for a tensor that no rank would read, or that cannot be split."""
    for shard in shards:
        own_part(source, shard)
    pieces = {name: piece for shard in shards for name, piece in _pieces(source, shard).items()}
    if source.checkpoint is not None:
        config = source.config
        if unknown := unknown_tensor(source.checkpoint, pieces, config.layers, config.tied_embeddings):
            raise CheckpointError(f"tensor {unknown} is not part of this architecture")


def _plain(options: EngineOptions) -> dict[str, Any]:
    """The options of the engine as JSON can have them; `options` may be the settings of a worker, with more."""
    values = options.model_dump(mode="json")
    return {name: values[name] for name in EngineOptions.model_fields}


def _ready(number: int, channel: Channel) -> int:
    """Wait until a rank has loaded its part -> bytes of its weights. Raises CheckpointError."""
    kind, content = channel.receive()
    if kind is Kind.REFUSED:
        raise CheckpointError(content.decode())
    assert kind is Kind.READY, f"rank {number} answers {kind.name}"
    return int(content)
