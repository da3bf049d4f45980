"""Floors of one H200: bytes / bandwidth and operations / rate. Knows shapes and formats, measures nothing.

A row's floor lets nothing overlap that different steps do: each request costs its prompt, and its share of every step
of answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.worker.loader import presets
from services.worker.loader.config import load_config
from services.worker.models.config import count_parameters

READ = 4.3e12
"""Memory bandwidth in bytes per second."""


@dataclass(frozen=True, slots=True)
class Format:
    """Storage and arithmetic of a number format; the head stays in 16 bits."""

    weight_bytes: float
    kv_bytes: float
    rate: float
    """Operations per second of matrix products in prefill."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a worker for this format."""


FORMATS: Mapping[str, Format] = {
    "bf16": Format(2, 2, 790e12),
    "fp8": Format(1, 1, 1580e12, {"QUANTIZE": "fp8", "KV_DTYPE": "fp8"}),
    "int4": Format(0.5, 2, 790e12, {"QUANTIZE": "int4"}),
}


def loop_tokens_per_s(model: str, format: str, inputs: int, outputs: int, concurrency: int) -> float:
    """Output tokens per second of a closed loop with `concurrency` requests."""
    config, stored = load_config(presets.folder_of(model)), FORMATS[format]
    head = config.vocab_size * config.hidden_size
    matrices = count_parameters(config) - (0 if config.tied_embeddings else head)
    wide = config.layers * config.heads * config.head_dim
    prompt_s = (2 * inputs * (matrices - head) + 2 * head + 2 * wide * inputs**2) / stored.rate
    kv = config.kv_bytes_per_token(1) * stored.kv_bytes
    context = inputs + outputs / 2
    weights = (matrices - head) * stored.weight_bytes + 2 * head
    read_s = (weights + concurrency * context * kv) / READ
    multiplied_s = (2 * concurrency * matrices + 4 * concurrency * context * wide) / stored.rate
    step_s = max(read_s, multiplied_s)
    return outputs * concurrency / (concurrency * prompt_s + outputs * step_s)
