"""Measures the scales of keys and values in fp8 from what a prompt of random tokens stores. Knows no checkpoint."""

import numpy as np
import torch

from kernels.kv_pages import FP8, LARGEST
from services.worker.engine.packing import prompt_alone
from services.worker.errors import CheckpointError
from services.worker.runners.inspection import DecoderRunner

TOKENS = 256
"""Tokens of the prompt, if the model's context is as long."""
_HEADROOM = 2
"""The largest number that a head can store is at least this multiple of the prompt's largest one."""
_SMALLEST = 2.0**-20
"""A head can store numbers of at least this size, even if the prompt stored only zeros."""


def measure_kv_scales(runner: DecoderRunner, tokens: int, blocks: int) -> None:
    """Set the scales of each layer of a runner's model, float32 [2, K]: powers of two, so that machines whose last bits
    differ agree. The runner is unused; its pool is in the model's dtype and has `blocks` blocks for `tokens` tokens.

    Raises CheckpointError where numbers are not finite.
    """
    ids = np.random.default_rng(0).integers(0, runner.model.config.vocab_size, tokens)
    finite = runner.run(prompt_alone(ids.tolist(), list(range(1, blocks + 1)))).finite
    if not all(finite):
        raise CheckpointError("scales of keys and values cannot be measured: the model's numbers are not finite")
    for layer, pool in zip(runner.model.layers, runner.kv.layers, strict=True):
        largest = pool.abs().amax((0, 1, 4)).float().clamp(min=_SMALLEST)
        layer.attention.kv_scales = torch.exp2(torch.log2(largest * (_HEADROOM / LARGEST[FP8])).ceil())
