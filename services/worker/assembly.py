"""Puts a model on its device: what memory it takes, its weights, its runner. Knows the order of a start, never jobs."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker import memory, presets
from services.worker.config import ModelConfig, load_config
from services.worker.job import EngineOptions
from services.worker.memory import MemoryPlan
from services.worker.model import Model, Progress, load_weights, randomize
from services.worker.ops import InvariantOps, Ops, ReferenceOps
from services.worker.runner import CpuRunner, Runner
from services.worker.weights import Checkpoint, open_checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    config: ModelConfig
    parameters: int
    memory: MemoryPlan
    runner: Runner


def assemble(model_dir: Path, options: EngineOptions, progress: Progress) -> Parts:
    """Load a checkpoint, or make random weights of a preset's shape. Raises CheckpointError."""
    progress("checkpoint", 0, 1)
    config = load_config(model_dir)
    checkpoint = None if presets.is_random(model_dir) else open_checkpoint(model_dir)
    progress("checkpoint", 1, 1)
    make = _on_cpu if options.device == "cpu" else _on_gpu
    return make(config, checkpoint, options, progress)


def _on_cpu(config: ModelConfig, checkpoint: Checkpoint | None, options: EngineOptions, progress: Progress) -> Parts:
    # Threads share out long sums, each number of them in another order: one is every worker's common denominator.
    threads = options.threads or (1 if options.deterministic else None)
    if threads:
        torch.set_num_threads(threads)
    dtype = _DTYPES[options.dtype]
    parameters = checkpoint.parameters if checkpoint else presets.parameters(config)
    plan = memory.plan_memory(config, parameters, dtype.itemsize, options, memory.available_memory())
    ops = InvariantOps() if options.deterministic else ReferenceOps()
    model = _loaded(config, ops, checkpoint, plan.max_seq_length, options, progress)
    runner = CpuRunner(
        model, ops, plan.kv_blocks, options.block_size, options.max_batch_size, plan.max_seq_length
    )  # fmt: skip
    return Parts(config, parameters, plan, runner)


def _on_gpu(config: ModelConfig, checkpoint: Checkpoint | None, options: EngineOptions, progress: Progress) -> Parts:
    """The pool of keys and values takes what is left when the weights are there and a step of full size has run."""
    from services.worker.gpu_ops import InvariantTritonOps, TritonOps, exact_products
    from services.worker.gpu_runner import GpuRunner

    exact_products()
    dtype = _DTYPES[options.dtype]
    parameters = checkpoint.parameters if checkpoint else presets.parameters(config)
    available = _free_bytes(options)
    max_length = memory.check_length(config, options)
    memory.check_weights(parameters * dtype.itemsize, available, options)
    ops = InvariantTritonOps() if options.deterministic else TritonOps()
    model = _loaded(config, ops, checkpoint, max_length, options, progress)
    runner = GpuRunner(
        model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens
    )  # fmt: skip
    progress("memory", 0, 1)
    workspace = runner.measure_workspace()
    plan = memory.plan_pool(
        config, parameters, dtype.itemsize, options, available, _free_bytes(options), workspace
    )  # fmt: skip
    runner.make_pools(plan.kv_blocks)
    if options.host_kv_bytes:
        runner.make_host_pages(options.host_kv_bytes)
    progress("memory", 1, 1)
    if options.graphs and options.device == "cuda":
        runner.capture(lambda done, total: progress("graphs", done, total))
    return Parts(config, parameters, plan, runner)


def _loaded(
    config: ModelConfig,
    ops: Ops,
    checkpoint: Checkpoint | None,
    max_length: int,
    options: EngineOptions,
    progress: Progress,
) -> Model:
    device = "cuda" if options.device == "cuda" else "cpu"
    model = Model(config, ops, _DTYPES[options.dtype], max_length, device)
    if checkpoint is None:
        randomize(model, progress)
    elif device == "cpu":
        load_weights(model, checkpoint, progress)
    else:
        from services.worker.streaming import stream_weights

        stream_weights(model, checkpoint, progress)
    return model


def _free_bytes(options: EngineOptions) -> int:
    if options.device != "cuda":
        return memory.available_memory()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
