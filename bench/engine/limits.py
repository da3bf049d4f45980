"""Floors of the bare engine's steps: bytes to read and operations, at the rates measured in the same run.

`bench.mesh.floors` has the floors of requests through the mesh, at fixed rates of one H200.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.engine.generation import GenerationEngine
from services.worker.models.config import ModelConfig, count_embeddings, count_parameters
from services.worker.models.moe import ExpertLinear
from services.worker.runners.cuda.runner import GpuRunner

# Least ceilings, from one H200: a run that measures lower ones is compared with these.
LEAST = {"read": 0.95 * 4.3e12, "matmul": 0.95 * 790e12, "fp8": 0.95 * 1580e12}


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's rates, as measured in this run, and the bytes and operations that the model needs."""

    config: ModelConfig
    read: float
    matmul: float
    linear: float
    """FLOP per second of the products in the layers: fp8's if their weights are fp8."""
    weights: float
    """Bytes of weights that a step reads."""
    kv_token: float
    """Bytes of a token's keys and values."""
    sustained: float
    """FLOP per second of bf16 products that go on for a second: the power limit has lowered the clocks by then."""
    experts: float = 0.0
    """Bytes of the weights of all experts, a part of `weights`."""

    @property
    def matrix_numbers(self) -> int:
        """Weights that multiply a token, the head included."""
        config, moe = self.config, self.config.moe
        numbers = count_parameters(config) - (0 if config.tied_embeddings else config.vocab_size * config.hidden_size)
        if moe is None:
            return numbers
        return numbers - expert_numbers(config) * (moe.experts - moe.chosen) // moe.experts

    def touched(self, tokens: int) -> float:
        """The share of all experts that `tokens` tokens are expected to choose, if each choice is as likely."""
        moe = self.config.moe
        return 1.0 - (1.0 - moe.chosen / moe.experts) ** tokens if moe is not None else 1.0

    def decode_s(self, batch: int, context: float) -> float:
        """The floor of a step of `batch` answers: the sum over its operators of what each must read or multiply."""
        config = self.config
        attended = 4 * batch * context * config.layers * config.heads * config.head_dim
        attention = max(batch * context * self.kv_token / self.read, attended / self.matmul)
        return self._products_s(batch, batch) + attention

    def prefill_s(self, tokens: int) -> float:
        """The floor of a prompt alone, as `decode_s`."""
        config = self.config
        attended = 2 * config.layers * config.heads * config.head_dim * tokens**2
        return self._products_s(tokens, 1) + max(tokens * self.kv_token / self.read, attended / self.matmul)

    def _products_s(self, tokens: int, sampled: int) -> float:
        """Those of the layers for all tokens, the head's for tokens that are sampled from. The head has 16 bits."""
        head = self.config.vocab_size * self.config.hidden_size
        weights = self.weights - 2 * head - self.experts * (1.0 - self.touched(tokens))
        layers = max(weights / self.read, 2 * tokens * (self.matrix_numbers - head) / self.linear)
        return layers + max(2 * head / self.read, 2 * sampled * head / self.matmul)


def expert_numbers(config: ModelConfig) -> int:
    """Numbers of the weights of all experts; 0 without any."""
    moe = config.moe
    if moe is None:
        return 0
    return sum(moe.layers) * moe.experts * config.hidden_size * moe.width * (2 + config.activation.is_gated)


def limits_for(
    config: ModelConfig, weights: float, ceilings: Mapping[str, float], *, fp8: bool, experts: float | None = None
) -> Limits:
    """The limits of a machine with these ceilings for a model. weights: bytes of the weights, but for an untied
    embedding, of which a step reads some rows only. experts: bytes of all experts; None: estimated from the mean bytes
    of a layer's numbers."""
    if experts is None:
        layers = count_parameters(config) - count_embeddings(config)
        experts = (weights - 2 * config.vocab_size * config.hidden_size) * expert_numbers(config) / layers
    return Limits(
        config,
        ceilings["read"],
        ceilings["matmul"],
        ceilings["fp8" if fp8 else "matmul"],
        weights,
        config.kv_bytes_per_token(1 if fp8 else 2),
        ceilings.get("sustained", ceilings["matmul"]),
        experts,
    )


def limits_of(engine: GenerationEngine, ceilings: Mapping[str, float], fp8: bool) -> Limits:
    """`limits_for` the model of an engine on one GPU."""
    assert isinstance(engine.runner, GpuRunner)
    model = engine.runner.model
    weights = model.nbytes - (0 if model.config.tied_embeddings else model.embedding.nbytes)
    experts = sum(each.linear.weight.nbytes for each in model.projections() if isinstance(each.linear, ExpertLinear))
    return limits_for(model.config, weights, ceilings, fp8=fp8, experts=experts)
