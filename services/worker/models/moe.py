"""The MLP of a mixture-of-experts layer: a router chooses, for each token, the experts that compute it. Knows weights
and the operations, never files or devices. On one of several ranks it may have some of the experts alone.
"""

import torch
from torch import Tensor

from kernels.quantized_weights import Weight
from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig, MoeConfig
from services.worker.models.layers import Linear, empty_norm
from services.worker.models.ops import ExpertWeights, Ops


class ExpertLinear(Linear):
    """The linear of one expert. Its weight is kept among those of the layer's other experts."""

    def __init__(self, ops: Ops, weights: ExpertWeights, expert: int, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__(ops, inputs, outputs, False, dtype)
        self._weights, self._expert = weights, expert

    def allocate(self) -> None:
        """Allocate memory for a plain weight."""
        self.weight = self._weights.allocate(self._expert)

    def set_weight(self, weight: Weight) -> None:
        """Keep a weight, quantized or plain, as the operations need it. Raises CheckpointError if they cannot."""
        try:
            self.weight = self._weights.keep(self._expert, weight)
        except ValueError as error:
            raise CheckpointError(f"expert {self._expert}: {error}") from None


class ExpertLinears:
    """A linear for each expert of a layer, all of one shape."""

    def __init__(self, ops: Ops, count: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self.weights = ops.expert_weights(count, outputs, inputs, dtype)
        self.linears = [ExpertLinear(ops, self.weights, expert, inputs, outputs, dtype) for expert in range(count)]


class SparseMlp:
    """sum over the chosen experts e of weight_e * down_e(activation(up_e(norm(x)))) (Shazeer et al. 2017)."""

    def __init__(self, ops: Ops, config: ModelConfig, moe: MoeConfig, dtype: torch.dtype) -> None:
        self.ops, self.activation, self.chosen, self.normalized = ops, config.activation, moe.chosen, moe.normalized
        self.own = range(moe.experts) if moe.own is None else moe.own
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self.after_norm = None
        self.router = torch.empty(moe.experts, config.hidden_size, dtype=dtype)
        """The weight of the product whose softmax weights the experts, [experts, hidden]; never quantized."""
        up_outputs = moe.width * (2 if config.activation.is_gated else 1)
        self.up = ExpertLinears(ops, len(self.own), config.hidden_size, up_outputs, dtype)
        self.down = ExpertLinears(ops, len(self.own), moe.width, config.hidden_size, dtype)

    def __call__(self, x: Tensor) -> None:
        """Add to the residual stream x [T, hidden]."""
        normed, routes = self.ops.norm_route(x, self.norm, self.router, self.chosen, self.normalized, self.own)
        self.ops.add_experts(x, normed, routes, self.activation, self.up.weights, self.down.weights)
