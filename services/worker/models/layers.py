"""The parts of a decoder layer. Each knows its weights and the operations, never files, jobs or devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.operands import Activation, Norm, Scores
from kernels.quantized_weights import Weight
from services.worker.models.config import ModelConfig, NormConfig
from services.worker.models.lora import AdaptedProduct, StepAdapters
from services.worker.models.ops import Ops, RopeTables


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one step share. T tokens, S rows that sample, D head dimension."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: each token's place in its sequence."""
    ropes: Mapping[int | None, RopeTables]
    """By window."""
    slot_mapping: Tensor
    """int64 [T]: where keys and values go, block * block size + offset."""
    plans: Mapping[int | None, Any]
    """What the operations' attention needs to know of the rows, by window."""
    sampled: Tensor | None
    """int64 [S]: the tokens that are sampled from, the last of each row that samples; None: all, in order."""
    adapters: StepAdapters | None = None
    """The adapters of the tokens; None: no token has one."""
    features: Tensor | None = None
    """[T, hidden]: what draft heads know of the token before each; None: a decoder reads tokens alone."""


class Linear:
    """x @ weight.T + bias, with what an implementation may fuse. The weight may be plain or quantized."""

    def __init__(self, ops: Ops, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        self.ops, self.inputs, self.outputs, self.dtype = ops, inputs, outputs, dtype
        self.weight: Any = torch.empty(outputs, inputs, dtype=dtype, device="meta")
        """A tensor [outputs, inputs], or what the operations prepared of a quantized weight."""
        self.bias = torch.empty(outputs, dtype=dtype) if bias else None
        self.adapters: AdaptedProduct | None = None
        """None: no adapter can change it."""

    @property
    def adapted(self) -> bool:
        """Whether adapters of the step's tokens may add to the product: then it cannot be fused with what follows."""
        return self.adapters is not None and self.adapters.active

    def allocate(self) -> None:
        """Allocate memory for a plain weight."""
        self.weight = self.ops.empty_weight(self.outputs, self.inputs, self.dtype)

    def set_weight(self, weight: Weight) -> None:
        """Prepare a weight, quantized or plain, and multiply with it from now on."""
        self.weight = self.ops.prepare(weight, self.dtype)

    def pack(self) -> None:
        """Put a plain weight that is loaded into the order in which products read it fastest."""
        if isinstance(self.weight, Tensor):
            self.set_weight(self.weight)

    def norm_matmul(self, x: Tensor, norm: Norm) -> Tensor:
        """The product with norm(x): [T, inputs] -> [T, outputs]."""
        if self.adapters is None or not self.adapters.active:
            return self.ops.norm_matmul(x, norm, self.weight, self.bias)
        normed = self.ops.normalize(x, norm)
        out = self.adapters.linear(normed, self.weight, self.bias)
        if out is None:
            out = self.ops.matmul(normed, self.weight, self.bias)
            self.adapters.add(out, normed)
        return out

    def norm_activate(self, x: Tensor, norm: Norm, activation: Activation) -> Tensor:
        """activation(the product with norm(x)), in the form that `add_matmul` takes."""
        if self.adapters is None or not self.adapters.active:
            return self.ops.norm_activate(x, norm, activation, self.weight, self.bias)
        if activation is Activation.GATED_SILU and self.bias is None:
            out = self.adapters.linear(self.ops.normalize(x, norm), self.weight, None, gated=True)
            if out is not None:
                return out
        return self.ops.activate(self.norm_matmul(x, norm), activation)

    def add_matmul(self, residual: Tensor, x: Tensor) -> None:
        """residual [T, outputs] += the product with x [T, inputs]."""
        self.ops.add_matmul(residual, x, self.weight, self.bias, self.adapters if self.adapted else None)


class Attention:
    """Grouped-query attention with fused projections, and norms of queries and keys if the model has them."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.ops = ops
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window = config.windows[layer]
        scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.scores = Scores(scale, config.attention_soft_cap)
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self.after_norm = empty_norm(config.norm, config.hidden_size, dtype) if config.norm.after else None
        self.qkv = Linear(ops, config.hidden_size, width, config.qkv_bias, dtype)
        self.output = Linear(ops, self.heads * self.head_dim, config.hidden_size, config.output_bias, dtype)
        self.kv_scales: Tensor | None = None
        """float32 [2, K]: the scale of each head's stored numbers in an fp8 pool; None: all 1."""
        rotated = self.heads + self.kv_heads
        self.qk_norm: Norm | None = None
        """Weight [H + K, D]."""
        if config.qk_norm:
            weight = torch.empty(rotated, self.head_dim, dtype=norm_dtype(config.norm, dtype))
            self.qk_norm = Norm(weight, config.norm.eps)

    def __call__(self, x: Tensor, step: StepTensors, kv: Tensor) -> None:
        """Add to the residual stream x [T, hidden]; kv is the layer's pool, written and read."""
        self.add_output(x, self.attend(x, step, kv))

    def add_output(self, x: Tensor, attended: Tensor) -> None:
        """Add the projection of the heads' output [T, heads * head_dim] to the residual stream x [T, hidden]."""
        add_normalized(x, self.output, attended, self.after_norm)

    def attend(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """The heads' output [T, heads * head_dim], before the output projection; the pool is written and read."""
        q = self._queries(x, step, kv)
        return self.ops.attention(q, kv, step.plans[self.window], self.scores, self.kv_scales)

    def _queries(self, x: Tensor, step: StepTensors, kv: Tensor) -> Tensor:
        """Queries [T, heads, head_dim]; keys and values go to the pool."""
        rope = step.ropes[self.window]
        if self.kv_scales is None and not self.qkv.adapted:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = self.ops.norm_qkv(x, self.norm, weight, bias, rope, kv, step.slot_mapping, self.heads, self.qk_norm)
            if q is not None:
                return q
        qkv = self.qkv.norm_matmul(x, self.norm).view(x.shape[0], -1, self.head_dim)
        return self.ops.rope_and_store(qkv, rope, kv, step.slot_mapping, self.heads, self.qk_norm, self.kv_scales)


class Mlp:
    """down(activation(up(norm(x)))); gate and up are one product if the activation is gated."""

    def __init__(self, ops: Ops, config: ModelConfig, dtype: torch.dtype) -> None:
        self.ops, self.activation = ops, config.activation
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self.after_norm = empty_norm(config.norm, config.hidden_size, dtype) if config.norm.after else None
        self.up = Linear(ops, config.hidden_size, config.up_outputs, config.mlp_bias, dtype)
        self.down = Linear(ops, config.intermediate_size, config.hidden_size, config.mlp_bias, dtype)

    def __call__(self, x: Tensor) -> None:
        """Add to the residual stream x [T, hidden]."""
        activated = self.up.norm_activate(x, self.norm, self.activation)
        add_normalized(x, self.down, activated, self.after_norm)


def add_normalized(x: Tensor, linear: Linear, inputs: Tensor, norm: Norm | None) -> None:
    """Add the product with `inputs`, normalized if there is a norm, to the residual stream x [T, hidden]."""
    if norm is None:
        linear.add_matmul(x, inputs)
        return
    product = torch.zeros_like(x)
    linear.add_matmul(product, inputs)
    x.add_(linear.ops.normalize(product, norm))


def empty_norm(config: NormConfig, width: int, dtype: torch.dtype) -> Norm:
    """A norm over rows of `width` numbers, whose weights have memory and no values yet."""
    bias = torch.empty(width, dtype=dtype) if config.has_bias else None
    return Norm(torch.empty(width, dtype=norm_dtype(config, dtype)), config.eps, config.kind, bias)


def norm_dtype(config: NormConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weights of norms in a model of this dtype."""
    return torch.float32 if config.offset else dtype
