"""Puts a model on its device: what memory it takes, its weights, its runner. Knows the order of a start, never jobs."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels import kv_pages
from services import host
from services.worker.build import kernel_cache, kv_calibration, memory
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.config import CheckpointConfig, read_config
from services.worker.loader.formats.registry import RoundedWeights, StoredWeights, WeightReader, reader_of
from services.worker.loader.kv_scales import load_kv_scales
from services.worker.loader.plain import load_weights, randomize
from services.worker.loader.quantized import expected_bytes, load_quantized, randomize_quantized
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.config import ModelConfig, count_parameters
from services.worker.models.decoder import Decoder
from services.worker.models.ops import Ops
from services.worker.models.registry import family_of
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.runners.base import Runner
from services.worker.runners.cpu.ops import InvariantOps, ReferenceOps
from services.worker.runners.cpu.runner import CpuRunner

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    config: ModelConfig
    parameters: int
    memory: MemoryPlan
    runner: Runner


def assemble(model_dir: Path, options: EngineOptions, progress: Progress) -> EngineParts:
    """Load a checkpoint, or make random weights of a preset's shape. Raises CheckpointError."""
    progress("checkpoint", 0, 1)
    settings = read_config(model_dir)
    config, reader = settings.model, reader_of(settings.quantization, options.quantize)
    checkpoint = None
    if not presets.is_random(model_dir):
        checkpoint = open_checkpoint(model_dir).renamed(family_of(config.architecture).tensor_name)
    progress("checkpoint", 1, 1)
    source = _Source(config, checkpoint, reader)
    if options.device == "cpu":
        return _on_cpu(config, source, options, progress)
    return _on_gpu(model_dir, settings, source, options, progress)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where weights come from."""

    config: ModelConfig
    checkpoint: Checkpoint | None
    """None: they are random."""
    reader: WeightReader | None
    """What reads the weights of products; None: they are plain."""

    @property
    def parameters(self) -> int:
        """Numbers that the model has."""
        if self.checkpoint and not isinstance(self.reader, StoredWeights):
            return self.checkpoint.parameters
        return count_parameters(self.config)

    def expected_bytes(self, dtype: torch.dtype, device: str) -> int:
        """About what the weights will take."""
        if self.reader is None:
            return self.parameters * dtype.itemsize
        return expected_bytes(self.config, self.checkpoint, self.reader, dtype, device)

    def load(self, ops: Ops, max_length: int, options: EngineOptions, progress: Progress) -> Decoder:
        """The model with its weights. Raises CheckpointError."""
        device = "cuda" if options.device == "cuda" else "cpu"
        is_quantized = self.reader is not None
        model = Decoder(self.config, ops, _DTYPES[options.dtype], max_length, device, meta_linears=is_quantized)
        if self.checkpoint and self.reader:
            load_quantized(model, self.checkpoint, self.reader, progress)
        elif isinstance(self.reader, RoundedWeights):
            randomize_quantized(model, self.reader, progress)
        elif self.checkpoint is None:
            randomize(model, progress)
        elif device == "cpu":
            load_weights(model, self.checkpoint, progress)
        else:
            from services.worker.loader.streaming import stream_weights

            stream_weights(model, self.checkpoint, progress)
        if self.checkpoint and _stored_dtype(self.config, options) == kv_pages.FP8:
            load_kv_scales(model.layers, self.checkpoint)
        return model


def _on_cpu(config: ModelConfig, source: _Source, options: EngineOptions, progress: Progress) -> EngineParts:
    # Threads share out long sums, each number of them in another order: one is every worker's common denominator.
    threads = options.threads or (1 if options.deterministic else None)
    if threads:
        torch.set_num_threads(threads)
    dtype = _DTYPES[options.dtype]
    weights = source.expected_bytes(dtype, options.device)
    stored = _stored_dtype(config, options)
    block_bytes = _block_bytes(config, options, stored)
    plan = memory.plan_memory(config, weights, dtype.itemsize, block_bytes, options, host.available_memory())
    ops = InvariantOps() if options.deterministic else ReferenceOps()
    model = source.load(ops, plan.max_seq_length, options, progress)
    if _measures_scales(model, stored, options):
        tokens, blocks = _probe(plan.max_seq_length, options)
        probe = CpuRunner(model, ops, blocks, options.block_size, 1, tokens, dtype)
        kv_calibration.measure_kv_scales(probe, tokens, blocks)
    runner = CpuRunner(
        model, ops, plan.kv_blocks, options.block_size, options.max_batch_size, plan.max_seq_length, stored
    )
    return EngineParts(config, source.parameters, replace(plan, weights=model.nbytes), runner)


def _on_gpu(
    model_dir: Path, settings: CheckpointConfig, source: _Source, options: EngineOptions, progress: Progress
) -> EngineParts:
    """The pool of keys and values takes what is left when the weights are there and a step of full size has run."""
    from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps, exact_products
    from services.worker.runners.cuda.runner import GpuRunner

    exact_products()
    config = settings.model
    dtype = _DTYPES[options.dtype]
    stored = _stored_dtype(config, options)
    available = _free_bytes(options)
    max_length = memory.check_length(config, options)
    weights = source.expected_bytes(dtype, options.device)
    memory.check_weights(weights, available, options)
    ops = InvariantTritonOps() if options.deterministic else TritonOps()
    compiled = kernel_cache.Marker(config, settings.quantization, options)
    with kernel_cache.compiling(model_dir, config, options, compiled, available - weights) as compilation:
        model = source.load(ops, max_length, options, progress)
        if compilation:
            compilation.wait(progress)
    if _measures_scales(model, stored, options):
        tokens, blocks = _probe(max_length, options)
        probe = GpuRunner(model, ops, options.block_size, 1, tokens, tokens, dtype)
        probe.pool.allocate(blocks)
        kv_calibration.measure_kv_scales(probe, tokens, blocks)
        del probe
    runner = GpuRunner(model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens, stored)
    progress("memory", 0, 1)
    workspace = runner.measure_workspace()
    block_bytes = _block_bytes(config, options, stored)
    plan = memory.plan_pool(config, model.nbytes, block_bytes, options, available, _free_bytes(options), workspace)
    runner.pool.allocate(plan.kv_blocks)
    if options.host_kv_bytes:
        runner.pool.use_host(options.host_kv_bytes)
    progress("memory", 1, 1)
    if options.device == "cuda":
        if options.graphs:
            runner.capture(lambda done, total: progress("graphs", done, total))
        runner.meet_kernels()
        compiled.set()
    return EngineParts(config, source.parameters, plan, runner)


def _stored_dtype(config: ModelConfig, options: EngineOptions) -> torch.dtype:
    """Of the pool's numbers. Raises CheckpointError where the device cannot have it."""
    name = config.kv_dtype if options.kv_dtype == "auto" else options.kv_dtype
    stored = {"fp8": kv_pages.FP8, "int8": kv_pages.INT8}.get(name, _DTYPES[options.dtype])
    if stored == kv_pages.FP8 and options.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise CheckpointError("keys and values in fp8 need a GPU of compute capability 8.9 or more: set KV_DTYPE=int8")
    return stored


def _measures_scales(model: Decoder, stored: torch.dtype, options: EngineOptions) -> bool:
    """Whether scales are to be measured: asked for, and the checkpoint brings none. Raises CheckpointError."""
    if options.kv_scales != "dynamic":
        return False
    if stored != kv_pages.FP8:
        raise CheckpointError("KV_SCALES=dynamic is for keys and values in fp8: set KV_DTYPE=fp8")
    return all(layer.attention.kv_scales is None for layer in model.layers)


def _probe(max_length: int, options: EngineOptions) -> tuple[int, int]:
    """Tokens of a prompt that measures, and its blocks."""
    tokens = min(kv_calibration.TOKENS, max_length)
    return tokens, -(-tokens // options.block_size)


def _block_bytes(config: ModelConfig, options: EngineOptions, stored: torch.dtype) -> int:
    return config.layers * kv_pages.page_bytes(options.block_size, config.kv_heads, config.head_dim, stored)


def _free_bytes(options: EngineOptions) -> int:
    if options.device != "cuda":
        return host.available_memory()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
