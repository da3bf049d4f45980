"""The operations in plain torch, on a CPU. Knows no model."""

import torch
from torch import Tensor

from kernels import quantized_cpu
from kernels.moe import reference as moe
from kernels.moe.reference import Routes
from kernels.operands import Activation, Norm
from kernels.plain_cpu import PackedProduct, is_packed_faster
from kernels.quantized_cpu import Product
from kernels.quantized_weights import Weight
from kernels.reference import attention as paged_attention
from kernels.reference import layers
from services.worker.models.lora import AdaptedProduct
from services.worker.models.ops import RopeTables
from services.worker.runners.cpu.experts import ExpertList


class ReferenceOps:
    """Plain torch. A row's last bits may depend on the other rows of its step."""

    packs = True
    """Whether plain weights may be packed, so that a row's last bits depend on the number of rows."""
    multiply = staticmethod(layers.matmul)
    activate = staticmethod(layers.activate)
    normalize = staticmethod(layers.normalize)
    attention = staticmethod(paged_attention.attention)
    plan_attention = staticmethod(paged_attention.plan_attention)
    route = staticmethod(moe.route)

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Column-major memory for float32, through which few rows stream 1.2 to 2.5 times as fast as through row-major
        memory; of 16 bits row-major memory is the faster one."""
        if dtype == torch.float32:
            return torch.empty(inputs, outputs, dtype=dtype).t()
        return torch.empty(outputs, inputs, dtype=dtype)

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Tensor | Product:
        """As `quantized_cpu.prepare`; plain weights are packed or, where that is no faster, column-major."""
        prepared = quantized_cpu.prepare(weight, dtype)
        if not isinstance(prepared, Tensor):
            return prepared
        if self.packs and is_packed_faster(prepared):
            return PackedProduct(prepared)
        outputs, inputs = prepared.shape
        wanted = self.empty_weight(outputs, inputs, dtype)
        return prepared if prepared.stride() == wanted.stride() else wanted.copy_(prepared)

    def matmul(self, x: Tensor, weight: Tensor | Product, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias."""
        return self.multiply(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)

    def norm_matmul(self, x: Tensor, norm: Norm, weight: Tensor | Product, bias: Tensor | None = None, /) -> Tensor:
        """norm(x) @ weight.T + bias."""
        return self.matmul(self.normalize(x, norm), weight, bias)

    def norm_activate(
        self, x: Tensor, norm: Norm, activation: Activation, weight: Tensor | Product, bias: Tensor | None = None, /
    ) -> Tensor:
        """activation(norm(x) @ weight.T + bias)."""
        return self.activate(self.norm_matmul(x, norm, weight, bias), activation)

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor | Product,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """residual += x @ weight.T + bias, and what adapters add to the product."""
        residual.add_(self.matmul(x, weight, bias))
        if adapters is not None:
            adapters.add(residual, x)

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: RopeTables,
        kv: Tensor,
        slot_mapping: Tensor,
        heads: int,
        qk_norm: Norm | None,
        kv_scales: Tensor | None = None,
        /,
    ) -> Tensor:
        """Norm, rotation and the write to the pool."""
        kv_heads = kv.shape[3]
        if qk_norm is not None:
            rotated = heads + kv_heads
            qkv[:, :rotated] = self.normalize(qkv[:, :rotated], qk_norm)
        cos, sin = rope.cos, rope.sin
        if rope.positions is not None:
            cos, sin = cos[rope.positions], sin[rope.positions]
        return layers.rope_and_store(qkv, cos, sin, kv, slot_mapping, heads, kv_heads, kv_scales)

    def expert_weights(self, count: int, outputs: int, inputs: int, dtype: torch.dtype, /) -> ExpertList:
        """Weights that are each in the layout of its kernel."""
        return ExpertList(self, count, outputs, inputs, dtype)

    def add_experts(
        self, residual: Tensor, x: Tensor, routes: Routes, activation: Activation, up: ExpertList, down: ExpertList, /
    ) -> None:
        """Each own expert that was chosen computes all its tokens at once."""
        chosen = routes.weights_Tk.shape[1]
        results = x.new_zeros(len(routes.order), x.shape[1])
        offsets = routes.offsets.tolist()
        for first, last, its_up, its_down in zip(offsets, offsets[1:], up, down, strict=False):
            if first < last:
                entries = routes.order[first:last]
                hidden = self.activate(self.matmul(x[entries // chosen], its_up), activation)
                results[entries] = self.matmul(hidden, its_down)
        moe.add_weighted(residual, results, routes.weights_Tk)

    def norm_route(
        self, x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool, own: range, /
    ) -> tuple[Tensor, Routes]:
        """One after the other."""
        normed = self.normalize(x, norm)
        return normed, self.route(self.matmul(normed, router), chosen, normalized, own)

    def norm_qkv(self, *_: object) -> None:
        """There is no such kernel."""


class InvariantOps(ReferenceOps):
    """Plain torch; a row has the same bits in any batch and any chunk."""

    packs = False
    multiply = staticmethod(layers.matmul_invariant)
    activate = staticmethod(layers.activate_invariant)
    attention = staticmethod(paged_attention.attention_invariant)
    plan_attention = staticmethod(paged_attention.plan_attention_invariant)


def plain_ops(deterministic: bool) -> ReferenceOps:
    """The operations of one process."""
    return InvariantOps() if deterministic else ReferenceOps()
