"""The operations of an encoder by the Triton kernels and the vendor's library: packed texts. Knows no model."""

from torch import Tensor

from kernels import linear, norm, texts
from kernels.activation import activate
from kernels.attention.packed_texts import attend_packed
from kernels.linear import DeviceWeight, resident_hopper, resident_norm_hopper
from kernels.operands import Activation, Norm
from services.worker.models.encoders.ops import EmbeddingTables, PackedTexts
from services.worker.runners.cuda.ops import TritonOps


class TritonEncoderOps(TritonOps):
    """Biases, activations and additions are fused into the products or into the norms that follow them. The plan of
    attention are the tiles of `kernels.attention.packed_texts`."""

    attend_packed = staticmethod(attend_packed)
    pool = staticmethod(texts.pool_texts)

    def embed(self, packed: PackedTexts, tables: EmbeddingTables, norm: Norm, /) -> Tensor:
        """norm(the sum of each token's rows)."""
        ids = packed.token_ids, packed.positions, packed.segments
        return texts.embed_texts(*ids, tables.tokens, tables.positions, tables.segments, norm)

    def matmul(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, /) -> Tensor:
        """x @ weight.T + bias."""
        if isinstance(weight, Tensor) and bias is not None and resident_hopper.serves(x, weight):
            return resident_hopper.linear(x, weight, bias, gelu=False)
        return linear.linear(x, weight, bias)

    def matmul_activate(
        self, x: Tensor, activation: Activation, weight: DeviceWeight, bias: Tensor | None, /
    ) -> Tensor:
        """activation(x @ weight.T + bias), by the product's own epilogue where there is one."""
        if isinstance(weight, Tensor) and bias is not None and linear.fuses_gelu(x, activation):
            if resident_hopper.serves(x, weight):
                return resident_hopper.linear(x, weight, bias, gelu=True)
            return linear.gelu(x, weight, bias)
        return activate(linear.linear(x, weight, bias), activation)

    def matmul_add_norm(
        self, x: Tensor, weight: DeviceWeight, bias: Tensor | None, residual: Tensor, its_norm: Norm, /
    ) -> Tensor:
        """norm(residual + x @ weight.T + bias): all in one kernel, or the product, then all else."""
        if isinstance(weight, Tensor) and resident_norm_hopper.serves(x, weight):
            return resident_norm_hopper.linear_add_norm(x, weight, bias, residual, its_norm, out=residual)
        product = linear.linear(x, weight)
        return norm.add_layer_norm(product, bias, residual, its_norm, out=product)
