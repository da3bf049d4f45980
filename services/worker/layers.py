"""The parts of a decoder layer. Each knows its weights and the operations, never files, jobs or devices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import AttentionPlan
from services.worker.config import ModelConfig, Rope
from services.worker.ops import Ops


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one step share. T tokens, S rows that sample, D head dimension."""

    token_ids: Tensor
    """int64 [T]."""
    cos: Tensor
    """[T, 1, D]."""
    sin: Tensor
    """[T, 1, D], the first half negated."""
    places: Tensor
    """int64 [T]: where keys and values go, block * block size + offset."""
    plans: dict[int | None, AttentionPlan]
    """By window."""
    sampled: Tensor
    """int64 [S]: the last token of each row that samples."""


class Linear:
    """x @ weight.T + bias. The precision is the weight's own affair."""

    def __init__(self, ops: Ops, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        self.ops = ops
        self.weight = torch.empty(outputs, inputs, dtype=dtype)
        self.bias = torch.empty(outputs, dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        return self.ops.matmul(x, self.weight, self.bias)


class Attention:
    """Grouped-query attention with fused projections; Qwen3's norms of queries and keys if the model has them."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.ops = ops
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window, self.eps = config.windows[layer], config.norm_eps
        self.scale = self.head_dim**-0.5
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(ops, config.hidden_size, width, config.qkv_bias, dtype)
        self.output = Linear(ops, self.heads * self.head_dim, config.hidden_size, config.output_bias, dtype)
        rotated = self.heads + self.kv_heads
        self.qk_norm = torch.empty(rotated, self.head_dim, dtype=dtype) if config.qk_norm else None

    def __call__(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """x [T, hidden]; kv is the layer's pool, written and read. -> [T, hidden]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        if self.qk_norm is not None:
            rotated = self.heads + self.kv_heads
            qkv[:, :rotated] = self.ops.rms_norm(qkv[:, :rotated], self.qk_norm, self.eps)
        q = self.ops.rope_and_store(qkv, step.cos, step.sin, kv, step.places, self.heads, self.kv_heads)
        return self.output(self.ops.attention(q, kv, step.plans[self.window], self.scale))


class Mlp:
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, ops: Ops, config: ModelConfig, dtype: torch.dtype) -> None:
        self.ops = ops
        self.gate_up = Linear(ops, config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, dtype)
        self.down = Linear(ops, config.intermediate_size, config.hidden_size, config.mlp_bias, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))


class DecoderLayer:
    """Norm, attention, norm, MLP; the residual stream is updated in place by the norms."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.attention_norm = torch.empty(config.hidden_size, dtype=dtype)
        self.attention = Attention(ops, config, layer, dtype)
        self.mlp_norm = torch.empty(config.hidden_size, dtype=dtype)
        self.mlp = Mlp(ops, config, dtype)


def rope_tables(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 to positions - 1, both [positions, 1, head_dim], the first half of sin negated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, rope)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * torch.pi / frequencies
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)
