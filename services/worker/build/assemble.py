"""Puts a model on its device: plans its memory, loads its weights, makes its runner. Knows no engine and no jobs."""

import contextlib
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import kv_pages
from services import host
from services.worker.build import kernel_cache, kv_calibration, memory
from services.worker.build.drafting.heads import load_heads, locate_heads
from services.worker.build.drafting.load import (
    DRAFT_WORKSPACE,
    draft_bytes_of_block,
    draft_context,
    load_cpu_draft,
    load_gpu_draft,
    redoes_guesses,
)
from services.worker.build.engine_parts import EngineParts
from services.worker.build.weights import (
    WeightSource,
    bytes_of_block,
    dtype_of,
    free_gpu_bytes,
    open_draft,
    open_source,
    stored_dtype,
)
from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig, count_parameters
from services.worker.models.decoder import Decoder
from services.worker.models.draft_heads import HeadsConfig
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.runners.base import Runner
from services.worker.runners.cpu.adapters import CpuAdapters
from services.worker.runners.cpu.drafts.heads import CpuHeads
from services.worker.runners.cpu.ops import plain_ops
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.inspection import DecoderRunner
from services.worker.runners.step import MOST_GUESSES

_MOST_THREADS = torch.get_num_threads()
"""What torch would use: this process's processors, or OMP_NUM_THREADS."""
_WEIGHTS_OF_A_THREAD = 16 << 20


def assemble(
    model_dir: Path, options: EngineOptions, progress: Progress, *, graphs: bool = True, compile_ahead: bool = False
) -> EngineParts:
    """Load a checkpoint, or make random weights of a preset's shape. Of a GPU: graphs: capture its steps;
    compile_ahead: compile kernels in processes beside the loading, where the cache on disk lacks them.

    Raises CheckpointError.
    """
    progress("checkpoint", 0, 1)
    source = open_source(model_dir, options)
    config = source.config
    draft = open_draft(model_dir, config, options)
    heads = locate_heads(options, config, source.checkpoint) if options.heads else None
    progress("checkpoint", 1, 1)
    if options.quantize_head and (options.on_gpu or options.tensor_parallel * options.pipeline_parallel > 1):
        raise CheckpointError("WEFT_QUANTIZE_HEAD is for one process on a CPU: elsewhere the head stays as it is")
    if options.fetch_dtype != "auto" and stored_dtype(config, options).itemsize == 1:
        raise CheckpointError(
            "WEFT_FETCH_DTYPE=fp8 is for pools of 16 or 32 bits: these keys and values have 8 already"
        )
    if options.tensor_parallel * options.pipeline_parallel > 1:
        from services.worker.build.ranks.grid import assemble_grid

        return assemble_grid(model_dir, source, draft, options, progress, compile_ahead=compile_ahead)
    if not options.on_gpu:
        return _on_cpu(config, source, draft, heads, options, progress)
    compiled = kernel_cache.Marker(config, source.quantization, options)
    spare = free_gpu_bytes() - source.expected_bytes(dtype_of(options), "cuda")
    compiling: kernel_cache.Compiling = contextlib.nullcontext()
    if compile_ahead:
        compiling = kernel_cache.compiling(model_dir, config, options, compiled, spare)
    parts = _on_gpu(config, source, draft, heads, options, progress, compiling, graphs)
    if graphs:  # Otherwise some kernels were not launched.
        compiled.set()
    return parts


def _threads_for(weights: int) -> int:
    """How many threads compute a model of this many bytes: products of small weights are over before a further thread
    has begun, and threads that wait for one another take processors from the other services."""
    return max(1, min(_MOST_THREADS, -(-weights // _WEIGHTS_OF_A_THREAD)))


def _on_cpu(
    config: ModelConfig,
    source: WeightSource,
    draft: WeightSource | None,
    heads: HeadsConfig | None,
    options: EngineOptions,
    progress: Progress,
) -> EngineParts:
    dtype, stored = dtype_of(options), stored_dtype(config, options)
    weights, block_bytes = source.expected_bytes(dtype, "cpu"), bytes_of_block(config, options, stored)
    if draft is not None:
        weights += draft.expected_bytes(dtype, "cpu")
        block_bytes += draft_bytes_of_block(draft, options)
    if heads is not None:
        weights += count_parameters(heads.layer) * dtype.itemsize
        block_bytes += _heads_bytes_of_block(heads, options, dtype)
    # Threads share out long sums, and the order of summation depends on their number.
    torch.set_num_threads(options.threads or options.numerics.threads or _threads_for(weights))
    plan = memory.plan_memory(config, weights, dtype.itemsize, block_bytes, options, host.available_memory())
    ops = plain_ops(options.deterministic)
    model = source.load(ops, plan.max_seq_length, options, progress)
    if measures_scales(model, stored, options):
        tokens, blocks = _calibration_size(plan.max_seq_length, options)
        calibrated = CpuRunner(model, ops, blocks, options.block_size, 1, tokens, dtype)
        kv_calibration.measure_kv_scales(calibrated, tokens, blocks)
    guessing, context = None, 0
    if draft is not None:
        context = draft_context(draft, plan.max_seq_length)
        guessing = load_cpu_draft(draft, options, ops, context, plan.kv_blocks, progress)
    if heads is not None:
        context = min(plan.max_seq_length, heads.layer.context_length)
        beside = load_heads(options, heads, model, dtype, context, progress)
        guessing = CpuHeads(beside, ops, plan.kv_blocks, options.block_size, dtype)
    adapters = CpuAdapters(model, ops, options.adapter_room) if options.adapter_room else None
    runner = CpuRunner(
        model, ops, plan.kv_blocks, options.block_size, options.max_batch_size, plan.max_seq_length, stored, guessing,
        adapters,
    )  # fmt: skip
    parts = _parts(source, options, replace(plan, weights=model.nbytes), runner, runner)
    return replace(parts, draft_context=context, redo_guesses=redoes_guesses(draft, heads), adapters=adapters)


def _on_gpu(
    config: ModelConfig,
    source: WeightSource,
    draft: WeightSource | None,
    heads: HeadsConfig | None,
    options: EngineOptions,
    progress: Progress,
    compiling: kernel_cache.Compiling,
    graphs: bool,
) -> EngineParts:
    """The KV pool takes the memory that is left when the weights are loaded and a step of full size has run."""
    from services.worker.runners.cuda.adapters import GpuAdapters
    from services.worker.runners.cuda.graphs import most_guesses
    from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps, exact_products
    from services.worker.runners.cuda.runner import GpuRunner
    from services.worker.runners.cuda.sharing.pool import SharedGpuPool

    exact_products()
    dtype, stored = dtype_of(options), stored_dtype(config, options)
    available = free_gpu_bytes()
    max_length = memory.check_length(config, options)
    weights = source.expected_bytes(dtype, "cuda") + (draft.expected_bytes(dtype, "cuda") if draft else 0)
    weights += count_parameters(heads.layer) * dtype.itemsize if heads else 0
    memory.check_weights(weights, available, options)
    ops = InvariantTritonOps() if options.deterministic else TritonOps()
    with compiling as compilation:
        model = source.load(ops, max_length, options, progress)
        if compilation:
            compilation.wait(progress)
    if measures_scales(model, stored, options):
        tokens, blocks = _calibration_size(max_length, options)
        calibrated = GpuRunner(model, ops, options.block_size, 1, tokens, tokens, dtype)
        calibrated.kv.allocate(blocks)
        kv_calibration.measure_kv_scales(calibrated, tokens, blocks)
        del calibrated
    guesses = MOST_GUESSES if options.speculate else 0
    adapters = None
    if options.adapter_room:
        adapters = GpuAdapters(model, options.adapter_room, options.adapter_rank, options.step_tokens)
    runner = GpuRunner(
        model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens, stored, guesses,
        adapters,
    )  # fmt: skip
    guessing, context, block_bytes = None, 0, bytes_of_block(config, options, stored)
    if draft is not None:
        context = draft_context(draft, max_length)
        guessing = load_gpu_draft(draft, options, runner, ops, context, progress)
        block_bytes += draft_bytes_of_block(draft, options)
    if heads is not None:
        context = min(max_length, heads.layer.context_length)
        guessing = runner.use_draft(load_heads(options, heads, model, dtype, context, progress), dtype)
        block_bytes += _heads_bytes_of_block(heads, options, dtype)
    progress("memory", 0, 1)
    workspace = runner.measure_workspace() + (DRAFT_WORKSPACE if guessing else 0)
    plan = memory.plan_pool(config, model.nbytes, block_bytes, options, available, free_gpu_bytes(), workspace)
    runner.kv.allocate(plan.kv_blocks)
    if guessing is not None:
        guessing.allocate(plan.kv_blocks)
    if options.host_kv_bytes:
        runner.kv.use_host(options.host_kv_bytes)
    progress("memory", 1, 1)
    if graphs:
        runner.capture(lambda done, total: progress("graphs", done, total))
    runner.warm_up_eager_kernels()
    limit = partial(most_guesses, guesses=guesses)
    parts = _parts(source, options, plan, runner, runner)
    shared = SharedGpuPool(runner.kv)
    redo = redoes_guesses(draft, heads)
    return replace(
        parts, draft_context=context, redo_guesses=redo, guess_limit=limit, adapters=adapters, shared_memory=shared
    )


def _parts(
    source: WeightSource, options: EngineOptions, plan: MemoryPlan, runner: Runner[Any], decoder: DecoderRunner
) -> EngineParts:
    """The parts around a runner, which is given once more as the decoder that it runs."""
    config, model = source.config, decoder.model
    stored = str(decoder.kv.layers[0].dtype).removeprefix("torch.")
    digest = _scales_digest(model) if options.kv_scales == "dynamic" else ""
    numerics = options.numerics.loaded(stored, digest)
    layout = numerics.block_layout(options.block_size, config.layers, config.kv_heads, config.head_dim)
    return EngineParts(config, source.parameters, plan, runner, layout, stored)


def _scales_digest(model: Decoder) -> str:
    """A digest of the scales of stored keys and values: measured ones may differ between machines."""
    scales = [layer.attention.kv_scales for layer in model.layers]
    return hashlib.sha256(repr([None if x is None else x.tolist() for x in scales]).encode()).hexdigest()[:8]


def measures_scales(model: Decoder, stored: torch.dtype, options: EngineOptions) -> bool:
    """Whether scales are to be measured: they were asked for, and the checkpoint has none. Raises CheckpointError."""
    if options.kv_scales != "dynamic":
        return False
    if stored != kv_pages.FP8:
        raise CheckpointError("KV_SCALES=dynamic is for keys and values in fp8: set KV_DTYPE=fp8")
    return all(layer.attention.kv_scales is None for layer in model.layers)


def _calibration_size(max_length: int, options: EngineOptions) -> tuple[int, int]:
    """Tokens of the prompt that measures scales, and its blocks."""
    tokens = min(kv_calibration.TOKENS, max_length)
    return tokens, -(-tokens // options.block_size)


def _heads_bytes_of_block(heads: HeadsConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values of the heads, and of the hidden states that they read."""
    return bytes_of_block(heads.layer, options, dtype) + options.block_size * heads.fused_width * dtype.itemsize
