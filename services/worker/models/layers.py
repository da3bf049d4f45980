"""The parts of a decoder layer. Each knows its weights and the operations, never files, jobs or devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized_weights import Weight
from services.worker.models.config import ModelConfig, Rope
from services.worker.models.ops import Ops, RopeTables


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one step share. T tokens, S rows that sample, D head dimension."""

    token_ids: Tensor
    """int64 [T]."""
    rotation: RopeTables
    places: Tensor
    """int64 [T]: where keys and values go, block * block size + offset."""
    plans: Mapping[int | None, Any]
    """What the operations' attention needs to know of the rows, by window."""
    sampled: Tensor | None
    """int64 [S]: the tokens that are sampled from, the last of each row that samples; None: all, in order."""


class Linear:
    """x @ weight.T + bias, with what an implementation may fuse. The precision is the weight's own affair."""

    def __init__(self, ops: Ops, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        self.ops, self.inputs, self.outputs, self.dtype = ops, inputs, outputs, dtype
        self.weight: Any = torch.empty(outputs, inputs, dtype=dtype, device="meta")
        """A tensor [outputs, inputs], or what the operations prepared of a quantized weight."""
        self.bias = torch.empty(outputs, dtype=dtype) if bias else None

    def make_room(self) -> None:
        """Memory for a plain weight."""
        self.weight = self.ops.empty_weight(self.outputs, self.inputs, self.dtype)

    def take(self, weight: Weight) -> None:
        """Multiply with this weight from now on."""
        self.weight = self.ops.prepare(weight, self.dtype)

    def of_normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The product with rms_norm(x): [T, inputs] -> [T, outputs]."""
        return self.ops.norm_matmul(x, norm, eps, self.weight, self.bias)

    def gate_of_normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """silu(first half) * second half of the product with rms_norm(x): [T, inputs] -> [T, outputs / 2]."""
        return self.ops.norm_gate(x, norm, eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [T, outputs] += the product with x [T, inputs]."""
        self.ops.add_matmul(residual, x, self.weight, self.bias)


class Attention:
    """Grouped-query attention with fused projections; Qwen3's norms of queries and keys if the model has them."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.ops = ops
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window, self.eps = config.windows[layer], config.norm_eps
        self.scale = self.head_dim**-0.5
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.norm = torch.empty(config.hidden_size, dtype=dtype)
        self.qkv = Linear(ops, config.hidden_size, width, config.qkv_bias, dtype)
        self.output = Linear(ops, self.heads * self.head_dim, config.hidden_size, config.output_bias, dtype)
        self.kv_scales: Tensor | None = None
        """float32 [2, K]: what a stored number of the fp8 pool counts, by head, if the checkpoint says."""
        rotated = self.heads + self.kv_heads
        self.qk_norm = torch.empty(rotated, self.head_dim, dtype=dtype) if config.qk_norm else None

    def __call__(self, x: Tensor, step: StepTensors, kv: Tensor) -> None:
        """Add to the residual stream x [T, hidden]; kv is the layer's pool, written and read."""
        self.output.add_to(x, self.attend(x, step, kv))

    def attend(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """What the heads see, [T, heads * head_dim], before the output projection; the pool is written and read."""
        q = self._queries(x, step, kv)
        return self.ops.attention(q, kv, step.plans[self.window], self.scale, self.kv_scales)

    def _queries(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """Queries [T, heads, head_dim]; keys and values go to the pool."""
        if self.qk_norm is None and self.kv_scales is None:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = self.ops.norm_qkv(x, self.norm, self.eps, weight, bias, step.rotation, kv, step.places, self.heads)
            if q is not None:
                return q
        qkv = self.qkv.of_normed(x, self.norm, self.eps).view(x.shape[0], -1, self.head_dim)
        return self.ops.rope_and_store(
            qkv, step.rotation, kv, step.places, self.heads, self.qk_norm, self.eps, self.kv_scales
        )


class Mlp:
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, ops: Ops, config: ModelConfig, dtype: torch.dtype) -> None:
        self.eps = config.norm_eps
        self.norm = torch.empty(config.hidden_size, dtype=dtype)
        self.gate_up = Linear(ops, config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, dtype)
        self.down = Linear(ops, config.intermediate_size, config.hidden_size, config.mlp_bias, dtype)

    def __call__(self, x: Tensor) -> None:
        """Add to the residual stream x [T, hidden]."""
        self.down.add_to(x, self.gate_up.gate_of_normed(x, self.norm, self.eps))


class DecoderLayer:
    """Attention, then the MLP; each begins with a norm and adds to the residual stream."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.attention = Attention(ops, config, layer, dtype)
        self.mlp = Mlp(ops, config, dtype)


def rope_tables(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 to positions - 1, both [positions, 1, head_dim], the first half of sin negated.

    They are made on the CPU, so that every device rotates by the same numbers.
    """
    with torch.device("cpu"):
        return _rope_tables(rope, head_dim, positions, dtype)


def _rope_tables(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
