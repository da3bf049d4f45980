"""The operations of a layer by the Triton kernels and the vendor's library. Knows which serves which shape."""

import torch
from torch import Tensor

from kernels import activation, attention, linear, norm, rope_kv
from kernels.linear import DeviceWeight, Norm
from kernels.quantized_weights import Weight
from services.worker.models.ops import RopeTables


class TritonOps:
    """The products take residual additions and the gate with them; `kernels.linear` knows which kernel."""

    rms_norm = staticmethod(norm.rms_norm)
    attention = staticmethod(attention.attention)
    invariant = False
    """Whether a row has the same bits in any batch and any chunk."""
    short_tokens = 1
    """Rows of up to so many tokens share out their keys over the whole chip."""

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Row after row."""
        return torch.empty(outputs, inputs, dtype=dtype)

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> DeviceWeight:
        """As the kernels read it best."""
        return linear.prepare(weight, dtype)

    def norm_matmul(
        self, x: Tensor, norm: Tensor, eps: float, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """rms_norm(x) @ weight.T + bias."""
        return linear.linear(x, weight, bias, norm=Norm(norm, eps))

    def norm_gate(
        self, x: Tensor, norm: Tensor, eps: float, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """The gate of the MLP, from the residual stream; `add_matmul` takes it as it comes, gated or not yet."""
        if bias is not None:
            return activation.silu_and_mul(self.norm_matmul(x, norm, eps, weight, bias))
        return linear.gate(x, weight, Norm(norm, eps))

    def add_matmul(self, residual: Tensor, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, /) -> None:
        """residual += x @ weight.T + bias."""
        linear.linear(x, weight, bias, residual=residual, out=residual)

    def rope_and_store(
        self,
        qkv: Tensor,
        rotation: RopeTables,
        kv: Tensor,
        places: Tensor,
        heads: int,
        norm: Tensor | None,
        eps: float,
        kv_scales: Tensor | None = None,
        /,
    ) -> Tensor:
        """Norm, rotation and the write to the pool in one kernel."""
        return rope_kv.rope_and_store(
            qkv, rotation.cos, rotation.sin, kv, places, heads, kv.shape[3], rotation.positions, norm, eps, kv_scales
        )

    def norm_qkv(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: DeviceWeight,
        bias: Tensor | None,
        rotation: RopeTables,
        kv: Tensor,
        places: Tensor,
        heads: int,
        /,
    ) -> Tensor | None:
        """Few rows need no kernel for the rotation."""
        if rotation.positions is None:
            return None
        return linear.rotated_qkv(
            x, weight, bias, Norm(norm, eps), rotation.cos, rotation.sin, rotation.positions, kv, places, heads
        )


class InvariantTritonOps(TritonOps):
    """A row has the same bits in any batch and any chunk: where a sum is cut depends on its own places alone."""

    invariant = True

    def norm_matmul(
        self, x: Tensor, norm: Tensor, eps: float, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """rms_norm(x) @ weight.T + bias."""
        return linear.invariant(self.rms_norm(x, norm, eps), weight, bias)

    def norm_gate(
        self, x: Tensor, norm: Tensor, eps: float, weight: DeviceWeight, bias: Tensor | None = None, /
    ) -> Tensor:
        """The gate of the MLP, from the residual stream."""
        return activation.silu_and_mul(self.norm_matmul(x, norm, eps, weight, bias))

    def add_matmul(self, residual: Tensor, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, /) -> None:
        """residual += x @ weight.T + bias."""
        residual.add_(linear.invariant(x, weight, bias))

    def norm_qkv(self, *_: object) -> None:
        """Not in one kernel."""


def exact_products() -> None:
    """float32 products in float32, on any device: no shortened mantissas."""
    torch.backends.cuda.matmul.allow_tf32 = False
