"""Plans a model's memory before it is loaded, with advice if it does not fit. Knows sizes, not tensors."""

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.options import EngineOptions, MemoryPlan, mib

_KV_SHARE = 0.25
_DEVICE_SHARE = 0.96  # of the free memory of a GPU: libraries allocate some later


class MemoryShortage(CheckpointError):
    """The model does not fit; the message has the missing bytes and the settings to lower."""


def plan_memory(
    config: ModelConfig, weights: int, element_bytes: int, block_bytes: int, options: EngineOptions, available: int
) -> MemoryPlan:
    """Size the KV pool, `block_bytes` a block, and check that everything fits beside `weights` bytes.

    Raises MemoryShortage with advice.
    """
    max_length = check_length(config, options)
    workspace = _workspace(config, element_bytes, options, max_length)
    room = int((available - weights - workspace) * _KV_SHARE)
    plan = _plan(options, block_bytes, room, max_length, weights, workspace, available)
    needed = plan.weights + plan.kv + plan.workspace
    if needed > available:
        raise MemoryShortage(f"{mib(needed)} are needed ({plan}): {_advice(plan, options)}")
    _check_sequence(plan, options)
    return plan


def check_length(config: ModelConfig, options: EngineOptions) -> int:
    """Most tokens of prompt and answer. Raises CheckpointError if they exceed the model's context."""
    max_length = options.max_seq_length or config.context_length
    if max_length > config.context_length:
        raise CheckpointError(f"max_seq_length {max_length} exceeds the model's context of {config.context_length}")
    return max_length


def check_weights(weights: int, available: int, options: EngineOptions) -> None:
    """Raises MemoryShortage if a device of `available` free bytes cannot hold the weights, before they are loaded."""
    if weights > available:
        raise MemoryShortage(f"the weights take {mib(weights)}, {mib(available)} are free: {_smaller(options)}")


def plan_pool(
    config: ModelConfig,
    weights: int,
    block_bytes: int,
    options: EngineOptions,
    available: int,
    free: int,
    workspace: int,
) -> MemoryPlan:
    """The plan of a device whose `weights` bytes are loaded, with `free` bytes left of which a step needs `workspace`.

    Raises MemoryShortage if no full sequence fits.
    """
    max_length = check_length(config, options)
    left = int(free * _DEVICE_SHARE) - workspace
    plan = _plan(options, block_bytes, left, max_length, weights, workspace, available)
    if plan.kv > left:
        raise MemoryShortage(f"{mib(plan.kv)} of KV do not fit into {mib(left)} ({plan}): {_advice(plan, options)}")
    _check_sequence(plan, options)
    return plan


def _plan(
    options: EngineOptions, block_bytes: int, room: int, max_length: int, weights: int, workspace: int, available: int
) -> MemoryPlan:
    blocks = _kv_blocks(options, block_bytes, max_length, room)
    return MemoryPlan(
        weights=weights,
        kv=(blocks + 1) * block_bytes,
        workspace=workspace,
        available=available,
        kv_blocks=blocks,
        kv_tokens=blocks * options.block_size,
        max_seq_length=max_length,
    )


def _kv_blocks(options: EngineOptions, block_bytes: int, max_length: int, room: int) -> int:
    """The number in the options; without one, what a full batch of full sequences needs, within `room` bytes."""
    if options.kv_blocks is not None:
        return options.kv_blocks
    if options.kv_bytes is not None:
        return max(options.kv_bytes // block_bytes - 1, 0)
    wanted = options.max_batch_size * -(-max_length // options.block_size)
    return max(min(wanted, room // block_bytes - 1), 0)


def _check_sequence(plan: MemoryPlan, options: EngineOptions) -> None:
    if options.kv_blocks is None and plan.kv_tokens < plan.max_seq_length:
        raise MemoryShortage(
            f"the KV pool cannot hold one full sequence ({plan}): lower max_seq_length or raise kv_bytes"
        )


def _workspace(config: ModelConfig, element_bytes: int, options: EngineOptions, max_length: int) -> int:
    """Bytes for activations of one layer, logits and their copies while sampling, gathered keys, masks and tables."""
    width = 4 * config.hidden_size + 3 * config.active_neurons + 4 * config.heads * config.head_dim
    activations = options.step_tokens * width * element_bytes
    sampling = options.max_batch_size * config.vocab_size * 48
    gathered = 4 * max_length * config.kv_heads * config.head_dim * element_bytes
    masks = 2 * options.step_tokens * max_length * element_bytes
    tables = 2 * max_length * config.head_dim * element_bytes
    return activations + sampling + gathered + masks + tables


def _advice(plan: MemoryPlan, options: EngineOptions) -> str:
    if plan.weights > plan.available:
        return f"the weights alone do not fit; {_smaller(options)}"
    if plan.weights + plan.workspace > plan.available:
        return "lower max_batch_size, step_tokens or max_seq_length"
    return "lower kv_blocks or kv_bytes"


def _smaller(options: EngineOptions) -> str:
    return (
        "take a smaller model or serve it in bfloat16"
        if options.numerics.dtype == "float32"
        else "take a smaller model"
    )
