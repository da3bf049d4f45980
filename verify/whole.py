"""Builds the step inputs of one whole sequence as a single row, in blocks 1, 2, ... of a runner's KV pools.

Legend: T tokens.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.base import Runner
from services.worker.runners.cpu.runner import CpuRunner

if TYPE_CHECKING:
    from services.worker.runners.cuda.runner import GpuRunner


def whole(runner: Runner, ids_T: Tensor) -> StepTensors:
    """The step of token ids int64 [T], on the model's device."""
    if isinstance(runner, CpuRunner):
        return _on_cpu(runner, ids_T)
    from services.worker.runners.cuda.runner import GpuRunner

    assert isinstance(runner, GpuRunner), type(runner).__name__
    return _on_gpu(runner, ids_T)


def _on_cpu(runner: CpuRunner, ids_T: Tensor) -> StepTensors:
    model, size, count = runner.model, runner.block_size, len(ids_T)
    blocks, places = _room(count, size)
    lengths, plan = np.array([count]), runner.ops.plan_attention
    windows, dtype = set(model.config.windows), model.embedding.dtype
    return StepTensors(
        token_ids=ids_T,
        positions=torch.arange(count),
        rope=RopeTables(model.cos[:count], model.sin[:count]),
        slot_mapping=places,
        plans={w: plan(lengths, lengths, blocks[None].numpy(), size, w, dtype) for w in windows},
        sampled=None,
    )


def _on_gpu(runner: "GpuRunner", ids_T: Tensor) -> StepTensors:
    from kernels.step_io import StepInputs

    device, count = runner.device, len(ids_T)
    blocks, places = _room(count, runner.block_size)
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    inputs = StepInputs(
        token_ids=ids_T,
        positions=torch.arange(count, device=device),
        slot_mapping=places.to(device),
        starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        contexts=torch.tensor([count], dtype=torch.int32, device=device),
        tables=blocks[None].to(device, torch.int32),
        sampled=nobody,
        sample_slots=nobody,
        sample_positions=nobody,
    )
    return runner.forward.step_of(inputs, count, None)


def _room(count: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks for `count` tokens, and each token's slot. Block 0 belongs to no sequence."""
    blocks, positions = torch.arange(1, -(-count // block_size) + 1), torch.arange(count)
    return blocks, blocks[positions // block_size] * block_size + positions % block_size
