"""The parts of a decoder layer. Each knows its weights and the operations, never files, jobs or devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.operands import Norm
from kernels.quantized_weights import Weight
from services.worker.models.config import LearnedPositions, ModelConfig, NormConfig, Rope
from services.worker.models.ops import Ops, RopeTables


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one step share. T tokens, S rows that sample, D head dimension."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: each token's place in its sequence."""
    rope: RopeTables
    slot_mapping: Tensor
    """int64 [T]: where keys and values go, block * block size + offset."""
    plans: Mapping[int | None, Any]
    """What the operations' attention needs to know of the rows, by window."""
    sampled: Tensor | None
    """int64 [S]: the tokens that are sampled from, the last of each row that samples; None: all, in order."""


class Linear:
    """x @ weight.T + bias, with what an implementation may fuse. The weight may be plain or quantized."""

    def __init__(self, ops: Ops, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        self.ops, self.inputs, self.outputs, self.dtype = ops, inputs, outputs, dtype
        self.weight: Any = torch.empty(outputs, inputs, dtype=dtype, device="meta")
        """A tensor [outputs, inputs], or what the operations prepared of a quantized weight."""
        self.bias = torch.empty(outputs, dtype=dtype) if bias else None

    def allocate(self) -> None:
        """Allocate memory for a plain weight."""
        self.weight = self.ops.empty_weight(self.outputs, self.inputs, self.dtype)

    def set_weight(self, weight: Weight) -> None:
        """Prepare a weight, quantized or plain, and multiply with it from now on."""
        self.weight = self.ops.prepare(weight, self.dtype)

    def norm_matmul(self, x: Tensor, norm: Norm) -> Tensor:
        """The product with norm(x): [T, inputs] -> [T, outputs]."""
        return self.ops.norm_matmul(x, norm, self.weight, self.bias)

    def add_matmul(self, residual: Tensor, x: Tensor) -> None:
        """residual [T, outputs] += the product with x [T, inputs]."""
        self.ops.add_matmul(residual, x, self.weight, self.bias)


class Attention:
    """Grouped-query attention with fused projections, and norms of queries and keys if the model has them."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.ops = ops
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window = config.windows[layer]
        self.scale = self.head_dim**-0.5
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self.qkv = Linear(ops, config.hidden_size, width, config.qkv_bias, dtype)
        self.output = Linear(ops, self.heads * self.head_dim, config.hidden_size, config.output_bias, dtype)
        self.kv_scales: Tensor | None = None
        """float32 [2, K]: the scale of each head's stored numbers in an fp8 pool; None: all 1."""
        rotated = self.heads + self.kv_heads
        self.qk_norm: Norm | None = None
        """Weight [H + K, D]."""
        if config.qk_norm:
            self.qk_norm = Norm(torch.empty(rotated, self.head_dim, dtype=dtype), config.norm.eps)

    def __call__(self, x: Tensor, step: StepTensors, kv: Tensor) -> None:
        """Add to the residual stream x [T, hidden]; kv is the layer's pool, written and read."""
        self.output.add_matmul(x, self.attend(x, step, kv))

    def attend(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """The heads' output [T, heads * head_dim], before the output projection; the pool is written and read."""
        q = self._queries(x, step, kv)
        return self.ops.attention(q, kv, step.plans[self.window], self.scale, self.kv_scales)

    def _queries(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """Queries [T, heads, head_dim]; keys and values go to the pool."""
        if self.qk_norm is None and self.kv_scales is None:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = self.ops.norm_qkv(x, self.norm, weight, bias, step.rope, kv, step.slot_mapping, self.heads)
            if q is not None:
                return q
        qkv = self.qkv.norm_matmul(x, self.norm).view(x.shape[0], -1, self.head_dim)
        return self.ops.rope_and_store(qkv, step.rope, kv, step.slot_mapping, self.heads, self.qk_norm, self.kv_scales)


class Mlp:
    """down(activation(up(norm(x)))); gate and up are one product if the activation is gated."""

    def __init__(self, ops: Ops, config: ModelConfig, dtype: torch.dtype) -> None:
        self.ops, self.activation = ops, config.activation
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self.up = Linear(ops, config.hidden_size, config.up_outputs, config.mlp_bias, dtype)
        self.down = Linear(ops, config.intermediate_size, config.hidden_size, config.mlp_bias, dtype)

    def __call__(self, x: Tensor) -> None:
        """Add to the residual stream x [T, hidden]."""
        up = self.up
        self.down.add_matmul(x, self.ops.norm_activate(x, self.norm, self.activation, up.weight, up.bias))


class DecoderLayer:
    """Attention, then the MLP; each begins with a norm and adds to the residual stream."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.attention = Attention(ops, config, layer, dtype)
        self.mlp = Mlp(ops, config, dtype)


def empty_norm(config: NormConfig, width: int, dtype: torch.dtype) -> Norm:
    """A norm over rows of `width` numbers, whose weights have memory and no values yet."""
    bias = torch.empty(width, dtype=dtype) if config.has_bias else None
    return Norm(torch.empty(width, dtype=dtype), config.eps, config.kind, bias)


def rope_tables(
    positions: Rope | LearnedPositions, head_dim: int, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 to count - 1, both [count, 1, head_dim], the first half of sin negated.

    Learned positions rotate nothing: cos is 1 and sin is 0. The tables are made on the CPU, so that every device
    rotates by the same numbers.
    """
    with torch.device("cpu"):
        if isinstance(positions, Rope):
            return _rope_tables(positions, head_dim, count, dtype)
        return torch.ones(count, 1, head_dim, dtype=dtype), torch.zeros(count, 1, head_dim, dtype=dtype)


def _rope_tables(rope: Rope, head_dim: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, rope)
    angles = torch.outer(torch.arange(count).float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    """Stretch long wavelengths, keep short ones, and blend those between (Llama 3.1)."""
    wavelengths = 2 * torch.pi / frequencies
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)
