"""Puts a model on its device: plans its memory, loads its weights, makes its runner. Knows no engine and no jobs."""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernels import kv_pages
from services import host
from services.worker.build import kernel_cache, kv_calibration, memory
from services.worker.build.drafting.draft import draft_head, draft_options, locate_draft
from services.worker.build.drafting.heads import load_heads, locate_heads
from services.worker.errors import CheckpointError
from services.worker.kvcache.shared_memory import SharedMemory
from services.worker.loader import presets
from services.worker.loader.config import read_config
from services.worker.loader.family_tensors import open_family
from services.worker.loader.formats.registry import RoundedWeights, StoredWeights, WeightReader, reader_of
from services.worker.loader.kv_scales import load_kv_scales
from services.worker.loader.plain import load_weights, pack_weights, randomize
from services.worker.loader.quantized import (
    copied_head_bytes,
    expected_bytes,
    load_quantized,
    randomize_quantized,
    round_head,
)
from services.worker.loader.tensors import Checkpoint
from services.worker.models.config import ModelConfig, count_parameters
from services.worker.models.decoder import Decoder
from services.worker.models.draft_heads import HeadsConfig
from services.worker.models.ops import Ops
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.runners.base import PreparedPages, Runner
from services.worker.runners.cpu.adapters import CpuAdapters
from services.worker.runners.cpu.draft_model import CpuDraftModel
from services.worker.runners.cpu.heads import CpuHeads
from services.worker.runners.cpu.ops import InvariantOps, ReferenceOps
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.inspection import DecoderRunner
from services.worker.runners.step import MOST_GUESSES

if TYPE_CHECKING:
    from services.worker.runners.cuda.draft_model import GpuDraftModel
    from services.worker.runners.cuda.ops import TritonOps
    from services.worker.runners.cuda.runner import GpuRunner

_MOST_THREADS = torch.get_num_threads()
"""What torch would use: this process's processors, or OMP_NUM_THREADS."""
_WEIGHTS_OF_A_THREAD = 16 << 20
DRAFT_WORKSPACE = 256 << 20
"""Bytes of the steps of a draft model or heads on a GPU: at most 512 tokens, and logits of 64 rows."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    config: ModelConfig
    parameters: int
    """Numbers in the checkpoint."""
    memory: MemoryPlan
    runner: Runner[Any]
    block_layout: str
    """The layout of the contents of blocks."""
    block_dtype: str
    """The format of their numbers."""
    draft_context: int = 0
    """Tokens of the context of the runner's draft model; 0: it has none."""
    adapters: PreparedPages | None = None
    """The runner's adapters; None: it serves none."""
    shared_memory: SharedMemory | None = None
    """The memory of the pool, for other processes of this host; None: it is not shared."""
    guess_limit: Callable[[int], int] | None = None
    """From the rows of a step to the most guesses of each; None: any number."""


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
        from services.worker.build.grid import assemble_grid

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


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of the weights."""

    config: ModelConfig
    checkpoint: Checkpoint | None
    """None: the weights are random."""
    reader: WeightReader | None
    """Reads the weights of linear layers; None: they are plain."""
    quantization: Mapping[str, Any] | None
    """The quantization_config of config.json."""
    head: str | None = None
    """The format that a plain head is rounded to; None: it stays as it is."""

    @property
    def parameters(self) -> int:
        """Numbers in the checkpoint."""
        if self.checkpoint and not isinstance(self.reader, StoredWeights):
            return self.checkpoint.parameters
        return count_parameters(self.config)

    def expected_bytes(self, dtype: torch.dtype, device: str) -> int:
        """About the bytes that the weights will take."""
        copied = copied_head_bytes(self.config, self.head) if self.head else 0
        if self.reader is None:
            return copied + self.parameters * dtype.itemsize
        return copied + expected_bytes(self.config, self.checkpoint, self.reader, dtype, device)

    def load(
        self,
        ops: Ops,
        max_length: int,
        options: EngineOptions,
        progress: Progress,
        make: Callable[..., Decoder] = Decoder,
    ) -> Decoder:
        """The model with its weights. make: a decoder, or a part of one. Raises CheckpointError."""
        device = "cuda" if options.on_gpu else "cpu"
        is_quantized = self.reader is not None
        model = make(self.config, ops, dtype_of(options), max_length, device, meta_linears=is_quantized)
        if self.checkpoint and self.reader:
            load_quantized(model, self.checkpoint, self.reader, progress)
        elif isinstance(self.reader, RoundedWeights):
            randomize_quantized(model, self.reader, progress)
        elif self.checkpoint is None:
            randomize(model, progress)
        elif device == "cpu" or self.checkpoint.is_part:
            load_weights(model, self.checkpoint, progress)
        else:
            from services.worker.loader.streaming import stream_weights

            stream_weights(model, self.checkpoint, progress)
        if self.checkpoint:
            model.add_norm_offset()
        if self.checkpoint and stored_dtype(self.config, options) == kv_pages.FP8:
            load_kv_scales(model.layers, self.checkpoint)
        if self.head:
            round_head(model, self.head)
        if device == "cpu":
            pack_weights(model)
        return model


def open_source(model_dir: Path, options: EngineOptions) -> WeightSource:
    """The source of the weights of a folder. Raises CheckpointError."""
    settings = read_config(model_dir)
    config, reader = settings.model, reader_of(settings.quantization, options.quantize)
    checkpoint = None
    if not presets.is_random(model_dir):
        checkpoint = open_family(model_dir, config)
    return WeightSource(config, checkpoint, reader, settings.quantization, options.quantize_head)


def open_draft(model_dir: Path, config: ModelConfig, options: EngineOptions) -> WeightSource | None:
    """The source of the weights of the draft model for the model in this folder; None: there is none. Raises
    CheckpointError."""
    if not options.draft:
        return None
    draft = open_source(locate_draft(options, model_dir, config), draft_options(options))
    return replace(draft, head=draft_head(options, draft.config.hidden_size))


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
    ops = plain_ops(options)
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
    return replace(parts, draft_context=context, adapters=adapters)


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
    return replace(parts, draft_context=context, guess_limit=limit, adapters=adapters, shared_memory=shared)


def plain_ops(options: EngineOptions) -> ReferenceOps:
    """The operations of one process on a CPU."""
    return InvariantOps() if options.deterministic else ReferenceOps()


def draft_context(draft: WeightSource, max_length: int) -> int:
    """Tokens of the context of a draft model beside a model of this length."""
    return min(max_length, draft.config.context_length)


def draft_bytes_of_block(draft: WeightSource, options: EngineOptions) -> int:
    """Bytes of one block's keys and values of the draft model."""
    return bytes_of_block(draft.config, options, stored_dtype(draft.config, draft_options(options)))


def load_cpu_draft(
    draft: WeightSource, options: EngineOptions, ops: ReferenceOps, context: int, blocks: int, progress: Progress
) -> CpuDraftModel:
    """The draft model of a CPU's runner. Raises CheckpointError."""
    own = draft_options(options)
    model = draft.load(ops, context, own, progress)
    return CpuDraftModel(model, ops, blocks, options.block_size, stored_dtype(draft.config, own))


def load_gpu_draft(
    draft: WeightSource,
    options: EngineOptions,
    runner: "GpuRunner",
    ops: "TritonOps",
    context: int,
    progress: Progress,
) -> "GpuDraftModel":
    """The draft model of a GPU's runner, which is to allocate its pool. Raises CheckpointError."""
    own = draft_options(options)
    return runner.use_draft(draft.load(ops, context, own, progress), stored_dtype(draft.config, own))


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


def dtype_of(options: EngineOptions) -> torch.dtype:
    """The format of weights and activations."""
    return _DTYPES[options.numerics.dtype]


def stored_dtype(config: ModelConfig, options: EngineOptions) -> torch.dtype:
    """The format of stored keys and values. Raises CheckpointError if the device does not support it."""
    name = config.kv_dtype if options.kv_dtype == "auto" else options.kv_dtype
    stored = {"fp8": kv_pages.FP8, "int8": kv_pages.INT8}.get(name, dtype_of(options))
    if stored == kv_pages.FP8 and options.on_gpu and torch.cuda.get_device_capability() < (8, 9):
        raise CheckpointError("keys and values in fp8 need a GPU of compute capability 8.9 or more: set KV_DTYPE=int8")
    return stored


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


def bytes_of_block(config: ModelConfig, options: EngineOptions, stored: torch.dtype) -> int:
    """Bytes of one block's keys and values, all layers."""
    return config.layers * kv_pages.page_bytes(options.block_size, config.kv_heads, config.head_dim, stored)


def _heads_bytes_of_block(heads: HeadsConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values of the heads, and of the hidden states that they read."""
    return bytes_of_block(heads.layer, options, dtype) + options.block_size * heads.fused_width * dtype.itemsize


def free_gpu_bytes() -> int:
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
