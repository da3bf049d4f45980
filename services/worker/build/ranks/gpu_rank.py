"""Puts one rank's part of a model on its GPU: its weights, its share of the blocks, its graphs. Knows no jobs.

Ranks take each of these steps together, because the steps that measure memory and those that are captured exchange
sums. A rank that cannot take one reports it to all others before they would wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from kernels.peers.memory import PeerMemoryError
from kernels.peers.words import WORD
from services.worker.build import kernel_cache, memory
from services.worker.build.drafting.load import DRAFT_WORKSPACE, draft_bytes_of_block, draft_context, load_gpu_draft
from services.worker.build.weights import WeightSource, bytes_of_block, dtype_of, free_gpu_bytes, stored_dtype
from services.worker.errors import AnotherRankFailed, CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.models.stage import StageDecoder
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.gpu_collectives import GpuCollectives, PeerWords
from services.worker.parallel.shards import Shard
from services.worker.parallel.topology import Grid
from services.worker.runners.cuda.adapters import GpuAdapters
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps, exact_products
from services.worker.runners.cuda.rank_ops import InvariantTritonRankOps, TritonRankOps
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.ranks import Rank
from services.worker.runners.step import MOST_GUESSES

Found = TypeVar("Found")
_ROWS = 2048
"""Rows of the residual stream that are exchanged at once."""


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Where a rank is: its grid, its part of the model, and the file in which ranks meet."""

    grid: Grid
    rank: int
    shard: Shard
    meeting: Path


def load_gpu_rank(
    source: WeightSource,
    draft: WeightSource | None,
    options: EngineOptions,
    place: GpuPlace,
    compiling: kernel_cache.Compiling,
    progress: Progress,
) -> tuple[Rank, MemoryPlan]:
    """Load the rank's part, `source`, and the draft model on the current device; `compiling` fills the cache of kernels
    meanwhile. Raises CheckpointError."""
    exact_products()
    config, max_length, rank = source.config, memory.check_length(source.config, options), place.rank
    available, stored = free_gpu_bytes(), stored_dtype(config, options)
    others = _meet(config, options, place)
    ops = rank_ops(options, others)
    make: Callable[..., StageDecoder] = partial(StageDecoder, shard=place.shard, others=others)
    guesses = MOST_GUESSES if options.speculate else 0

    def load() -> GpuRunner:
        with compiling as compilation:
            model = source.load(ops, max_length, options, progress, make)
            if compilation:
                compilation.wait(progress)
        adapters = None
        if options.adapter_room:
            adapters = GpuAdapters(model, options.adapter_room, options.adapter_rank, options.step_tokens)
        made = GpuRunner(
            model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens, stored, guesses,
            adapters,
        )  # fmt: skip
        if draft is not None:
            load_gpu_draft(draft, options, made, plain_ops(options), draft_context(draft, max_length), progress)
        return made

    runner = _together(others, rank, load)
    progress("memory", 0, 1)
    workspace = runner.measure_workspace()  # The ranks compute a step together: one that fails here ends the grid.
    plan = _together(others, rank, partial(_plan, runner, workspace, config, draft, options, available))
    blocks = others.least(plan.kv_blocks)
    runner.kv.allocate(blocks)
    if runner.draft is not None:
        runner.draft.allocate(blocks)
    progress("memory", 1, 1)
    runner.capture(lambda done, total: progress("graphs", done, total))
    runner.warm_up_eager_kernels()
    plan = replace(plan, kv_blocks=blocks, kv_tokens=blocks * options.block_size)
    return Rank(runner, runner.model.nbytes, place.grid, rank, runner.adapters), plan


def _meet(config: ModelConfig, options: EngineOptions, place: GpuPlace) -> GpuCollectives:
    """The connections to the other ranks. Raises CheckpointError."""
    try:
        return GpuCollectives(place.grid, place.rank, place.meeting, peer_words_of(config, options, place.grid))
    except PeerMemoryError as error:
        raise CheckpointError(f"rank {place.rank}: {error}") from None


def _plan(
    runner: GpuRunner,
    workspace: int,
    config: ModelConfig,
    draft: WeightSource | None,
    options: EngineOptions,
    available: int,
) -> MemoryPlan:
    """The plan of this rank's memory. config: of the whole model; available: free bytes before anything was loaded.
    Raises CheckpointError."""
    block_bytes = bytes_of_block(runner.model.config, options, stored_dtype(config, options))
    if draft is not None:
        workspace, block_bytes = workspace + DRAFT_WORKSPACE, block_bytes + draft_bytes_of_block(draft, options)
    free = free_gpu_bytes()
    return memory.plan_pool(config, runner.model.nbytes, block_bytes, options, available, free, workspace)


def rank_ops(options: EngineOptions, others: GpuCollectives) -> TritonOps:
    """The operations of a rank with these options. Stages alone have no sums."""
    if others.grid.tensor == 1:
        return plain_ops(options)
    return InvariantTritonRankOps(others) if options.deterministic else TritonRankOps(others)


def plain_ops(options: EngineOptions) -> TritonOps:
    """The operations of a model that one rank computes alone."""
    return InvariantTritonOps() if options.deterministic else TritonOps()


def peer_words_of(config: ModelConfig, options: EngineOptions, grid: Grid) -> PeerWords:
    """The room for what ranks exchange."""
    item, share = dtype_of(options).itemsize, -(-config.vocab_size // grid.tensor) + 1
    sums = max(_ROWS * config.hidden_size, share) * item // WORD
    return PeerWords(sums, options.step_tokens * config.hidden_size * item // WORD)


def _together(others: Collectives, rank: int, work: Callable[[], Found]) -> Found:
    """What `work` returns, once it has succeeded on all ranks. Raises CheckpointError."""
    try:
        found = work()
    except CheckpointError as error:
        others.least(0)
        raise CheckpointError(f"rank {rank}: {error}") from None
    except torch.OutOfMemoryError as error:
        others.least(0)
        raise CheckpointError(f"rank {rank}: {error}") from None
    if not others.least(1):
        raise AnotherRankFailed("another rank could not load its part")
    return found
