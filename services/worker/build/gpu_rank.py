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
from services.worker.build.assemble import (
    DRAFT_WORKSPACE,
    WeightSource,
    bytes_of_block,
    draft_bytes_of_block,
    draft_context,
    dtype_of,
    free_gpu_bytes,
    load_gpu_draft,
    stored_dtype,
)
from services.worker.errors import AnotherRankFailed, CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
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
    available = free_gpu_bytes()
    try:
        others = GpuCollectives(place.grid, rank, place.meeting, peer_words_of(config, options, place.grid))
    except PeerMemoryError as error:
        raise CheckpointError(f"rank {rank}: {error}") from None
    ops = rank_ops(options, others)
    make: Callable[..., StageDecoder] = partial(StageDecoder, shard=place.shard, others=others)

    def load() -> tuple[Decoder, GpuAdapters | None]:
        with compiling as compilation:
            model = source.load(ops, max_length, options, progress, make)
            if compilation:
                compilation.wait(progress)
        if not options.adapter_room:
            return model, None
        return model, GpuAdapters(model, options.adapter_room, options.adapter_rank, options.step_tokens)

    (model, adapters), stored = _together(others, rank, load), stored_dtype(config, options)
    guesses = MOST_GUESSES if options.speculate else 0
    runner = GpuRunner(
        model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens, stored, guesses,
        adapters,
    )  # fmt: skip
    guessing = None
    if draft is not None:
        alone, context = plain_ops(options), draft_context(draft, max_length)
        guessing = _together(others, rank, partial(load_gpu_draft, draft, options, runner, alone, context, progress))
    progress("memory", 0, 1)
    workspace, block_bytes = runner.measure_workspace(), bytes_of_block(model.config, options, stored)
    if draft is not None:
        workspace, block_bytes = workspace + DRAFT_WORKSPACE, block_bytes + draft_bytes_of_block(draft, options)

    def plan() -> MemoryPlan:
        free = free_gpu_bytes()
        return memory.plan_pool(config, model.nbytes, block_bytes, options, available, free, workspace)

    planned = _together(others, rank, plan)
    blocks = others.least(planned.kv_blocks)
    runner.kv.allocate(blocks)
    if guessing is not None:
        guessing.allocate(blocks)
    progress("memory", 1, 1)
    runner.capture(lambda done, total: progress("graphs", done, total))
    runner.warm_up_eager_kernels()
    planned = replace(planned, kv_blocks=blocks, kv_tokens=blocks * options.block_size)
    return Rank(runner, model.nbytes, place.grid, rank, adapters), planned


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
