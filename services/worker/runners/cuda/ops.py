"""The operations of a layer by the Triton kernels and the vendor's library. Knows which kernel serves which shape."""

import torch
from torch import Tensor

from kernels import attention, linear, norm, rope_kv
from kernels.activation import activate
from kernels.linear import DeviceWeight
from kernels.moe import grouped, one_token, routing
from kernels.moe.one_token import Chances
from kernels.moe.reference import Routes
from kernels.moe.weights import ExpertStack
from kernels.operands import Activation, Norm
from kernels.quantized_weights import Weight
from services.worker.models.lora import AdaptedProduct
from services.worker.models.ops import RopeTables


class TritonOps:
    """Residual additions and gates are fused into the products; `kernels.linear` chooses the kernel."""

    normalize = staticmethod(norm.normalize)
    activate = staticmethod(activate)
    attention = staticmethod(attention.attention)
    route = staticmethod(routing.route)
    invariant = False
    """Whether a row has the same bits in any batch and any chunk."""
    waits_for_ranks = False
    """Whether kernels wait for those of other ranks, so that what delays a launch of one rank delays all."""
    short_tokens = 1
    """The keys of rows of up to this many tokens are shared out over the whole chip."""

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Row-major memory."""
        return torch.empty(outputs, inputs, dtype=dtype)

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> DeviceWeight:
        """In the layout of the kernels."""
        return linear.prepare(weight, dtype)

    def matmul(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias."""
        return linear.linear(x, weight, bias)

    def norm_matmul(self, x: Tensor, norm: Norm | None, weight: DeviceWeight, bias: Tensor | None = None, /) -> Tensor:
        """norm(x) @ weight.T + bias; without a norm x is normalized already, here and in what follows."""
        return linear.linear(x, weight, bias, norm=norm)

    def norm_activate(
        self, x: Tensor, norm: Norm | None, activation: Activation, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """activation(norm(x) @ weight.T + bias), [T, n]; or [T, 2n], which the product of `add_matmul` gates itself."""
        if activation is Activation.GATED_SILU and bias is None:
            return linear.gate(x, weight, norm)
        return activate(self.norm_matmul(x, norm, weight, bias), activation)

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: DeviceWeight,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """residual += x @ weight.T + bias, and what adapters add to the product: for few rows in one kernel."""
        if adapters is not None and adapters.linear(x, weight, bias, residual) is not None:
            return
        linear.linear(x, weight, bias, residual=residual, out=residual)
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
        """Norm, rotation and the write to the pool in one kernel."""
        weight, eps = (None, 0.0) if qk_norm is None else (qk_norm.weight, qk_norm.eps)
        return rope_kv.rope_and_store(
            qkv, rope.cos, rope.sin, kv, slot_mapping, heads, kv.shape[3], rope.positions, weight, eps, kv_scales
        )

    def expert_weights(self, count: int, outputs: int, inputs: int, dtype: torch.dtype, /) -> ExpertStack:
        """A stack of all weights."""
        return ExpertStack(count, outputs, inputs, dtype)

    def norm_route(
        self, x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool, own: range, /
    ) -> tuple[Tensor, Routes | Chances]:
        """For one token the products of the experts make the choice, in each program."""
        if len(own) == len(router) and one_token.serves(x, norm, len(router), chosen):
            return one_token.norm_router(x, norm, router, chosen, normalized)
        return self.norm_then_route(x, norm, router, chosen, normalized, own)

    def norm_then_route(
        self, x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool, own: range, /
    ) -> tuple[Tensor, Routes]:
        """The norm, the product with the router and the choice, one after the other."""
        normed = self.normalize(x, norm)
        return normed, self.route(self.matmul(normed, router), chosen, normalized, own)

    def add_experts(
        self,
        residual: Tensor,
        x: Tensor,
        routes: Routes | Chances,
        activation: Activation,
        up: ExpertStack,
        down: ExpertStack,
        /,
    ) -> None:
        """Each product of all experts is one launch; for few rows the first one has the activation, too."""
        if isinstance(routes, Chances):
            if one_token.add_experts(residual, x, routes, activation, up, down):
                return
            routes = self.route(routes.logits, routes.chosen, routes.normalized)
        chosen = routes.weights_Tk.shape[1]
        hidden = grouped.multiply_activate(x, up, routes, activation, divide=chosen, invariant=self.invariant)
        grouped.multiply_add(residual, hidden, down, routes, invariant=self.invariant)

    def norm_qkv(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: DeviceWeight,
        bias: Tensor | None,
        rope: RopeTables,
        kv: Tensor,
        slot_mapping: Tensor,
        heads: int,
        qk_norm: Norm | None,
        /,
    ) -> Tensor | None:
        """For few rows the product, the rotation and the write are one kernel."""
        if rope.positions is None:
            return None
        return linear.rotated_qkv(
            x, weight, bias, norm, rope.cos, rope.sin, rope.positions, kv, slot_mapping, heads, qk_norm
        )


class InvariantTritonOps(TritonOps):
    """A row has the same bits in any batch and any chunk: where a sum is cut depends on the row's own length alone."""

    invariant = True

    def matmul(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias."""
        return linear.invariant(x, weight, bias)

    def norm_matmul(self, x: Tensor, norm: Norm | None, weight: DeviceWeight, bias: Tensor | None = None, /) -> Tensor:
        """norm(x) @ weight.T + bias."""
        return linear.invariant(x if norm is None else self.normalize(x, norm), weight, bias)

    def norm_activate(
        self, x: Tensor, norm: Norm | None, activation: Activation, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """activation(norm(x) @ weight.T + bias), [T, n]."""
        return activate(self.norm_matmul(x, norm, weight, bias), activation)

    def add_matmul(
        self,
        residual: Tensor,
        x: Tensor,
        weight: DeviceWeight,
        bias: Tensor | None = None,
        adapters: AdaptedProduct | None = None,
        /,
    ) -> None:
        """residual += x @ weight.T + bias, and what adapters add to the product."""
        residual.add_(linear.invariant(x, weight, bias))
        if adapters is not None:
            adapters.add(residual, x)

    def norm_route(
        self, x: Tensor, norm: Norm, router: Tensor, chosen: int, normalized: bool, own: range, /
    ) -> tuple[Tensor, Routes]:
        """One after the other."""
        return self.norm_then_route(x, norm, router, chosen, normalized, own)

    def norm_qkv(self, *_: object) -> None:
        """There is no such kernel."""


def exact_products() -> None:
    """float32 products in float32, on any device: no shortened mantissas."""
    torch.backends.cuda.matmul.allow_tf32 = False
