"""A layer of the decoder: attention, then an MLP or a mixture of experts. Knows its parts, never their names."""

from collections.abc import Mapping, Sequence

import torch

from services.worker.models.config import ModelConfig
from services.worker.models.family import Part
from services.worker.models.layers import Attention, Linear, Mlp
from services.worker.models.moe import SparseMlp
from services.worker.models.ops import Ops


class DecoderLayer:
    """Attention, then the MLP; each begins with a norm and adds to the residual stream."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        self.attention = Attention(ops, config, layer, dtype)
        sparse = config.moe if config.has_experts(layer) else None
        self.mlp = Mlp(ops, config, dtype) if sparse is None else SparseMlp(ops, config, sparse, dtype)

    def linears(self) -> Mapping[Part, Sequence[Linear]]:
        """The products of the layer; those of a mixture of experts are one for each expert."""
        attention, mlp = self.attention, self.mlp
        found: dict[Part, Sequence[Linear]] = {Part.QKV: [attention.qkv], Part.OUTPUT: [attention.output]}
        if isinstance(mlp, SparseMlp):
            return found | {Part.EXPERT_UP: mlp.up.linears, Part.EXPERT_DOWN: mlp.down.linears}
        return found | {Part.UP: [mlp.up], Part.DOWN: [mlp.down]}
