"""Builds an engine on the paced runner: the shape of a checkpoint, none of its weights. Knows no tensors."""

from pathlib import Path

from services.host import available_memory
from services.worker.build.drafting.speculate import make_speculation
from services.worker.engine.generation import GenerationEngine
from services.worker.engine.step_times import StepTimes
from services.worker.errors import CheckpointError
from services.worker.loader.config import load_config
from services.worker.models.config import ModelConfig
from services.worker.options import EngineOptions, MemoryPlan
from services.worker.runners.paced import PacedRunner, PacedTiming

MOST_CONTEXT = 128 * 1024
_POOL_TOKENS = 1 << 20  # of a pool whose size is not set
_KV_ELEMENT_BYTES = 2


def build_paced_engine(folder: Path, options: EngineOptions) -> tuple[GenerationEngine, ModelConfig]:
    """The engine for a model of this shape, and the shape. Raises CheckpointError."""
    if options.heads:
        raise CheckpointError("the paced engine pretends a draft model, no heads: set WEFT_SPECULATE=draft:any")
    config = load_config(folder)
    timing = PacedTiming(options.paced_step_ms / 1e3, options.paced_prefill_rate)
    runner = PacedRunner(
        config.vocab_size, config.eos_token_ids, options.max_batch_size, timing, options.paced_acceptance
    )
    engine = GenerationEngine(
        options,
        _plan_memory(config, options),
        runner,
        config.eos_token_ids,
        step_times=StepTimes(timing.step_s, timing.prefill_rate),
        speculation=make_speculation(options, config.context_length),
    )
    return engine, config


def _plan_memory(config: ModelConfig, options: EngineOptions) -> MemoryPlan:
    """A pool of the size asked for (in bytes: those of the model in 16 bits), which takes no memory. Raises
    CheckpointError."""
    max_length = options.max_seq_length or config.context_length
    if max_length > max(MOST_CONTEXT, config.context_length):
        raise CheckpointError(f"max_seq_length {max_length} exceeds the {MOST_CONTEXT} of the paced engine")
    blocks = options.kv_blocks
    if blocks is None and options.kv_bytes is not None:
        blocks = options.kv_bytes // (options.block_size * config.kv_bytes_per_token(_KV_ELEMENT_BYTES))
    if blocks is None:
        blocks = max(_POOL_TOKENS, max_length) // options.block_size
    return MemoryPlan(
        weights=0,
        kv=0,
        workspace=0,
        available=available_memory(),
        kv_blocks=blocks,
        kv_tokens=blocks * options.block_size,
        max_seq_length=max_length,
    )
