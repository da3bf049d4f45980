"""The floors of a bare loop's steps: what they must read and multiply, at the rates that the same run has shown.

`bench.floors` has those of rows through the mesh, at the rates of one H200.
"""

from dataclasses import dataclass

from services.worker import presets
from services.worker.config import ModelConfig
from services.worker.engine import Engine
from services.worker.gpu_runner import GpuRunner

# What one H200 has shown: a run that measures less on its own ceilings is still held to these.
LEAST = {"read": 0.95 * 4.3e12, "matmul": 0.95 * 790e12, "fp8": 0.95 * 1580e12}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do, as measured in this run, and what the model needs of it."""

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

    @property
    def matrix_numbers(self) -> int:
        """Weights that a step multiplies with, the head included."""
        config = self.config
        return presets.parameters(config) - (0 if config.tied_embeddings else config.vocab_size * config.hidden_size)

    def decode_s(self, batch: int, context: float) -> float:
        """The floor of a step of `batch` answers."""
        config = self.config
        moved = self.weights + batch * context * self.kv_token
        attended = 4 * batch * context * config.layers * config.heads * config.head_dim
        return max(moved / self.read, self._busy_s(batch, batch, attended))

    def prefill_s(self, tokens: int) -> float:
        """The floor of a prompt alone."""
        config = self.config
        attended = 2 * config.layers * config.heads * config.head_dim * tokens**2
        return max(self.weights / self.read, self._busy_s(tokens, 1, attended))

    def _busy_s(self, tokens: int, sampled: int, attended: float) -> float:
        """Seconds of the matrix units."""
        head = self.config.vocab_size * self.config.hidden_size
        layers = 2 * tokens * (self.matrix_numbers - head)
        return layers / self.linear + (2 * sampled * head + attended) / self.matmul


def limits_of(engine: Engine, ceilings: dict[str, float], fp8: bool) -> Limits:
    """What the machine can do for this engine's model. Of an embedding of its own a step reads some rows only."""
    assert isinstance(engine.runner, GpuRunner)
    model, config = engine.runner.model, engine.config
    weights = model.nbytes - (0 if config.tied_embeddings else model.embedding.nbytes)
    return Limits(
        config,
        ceilings["read"],
        ceilings["matmul"],
        ceilings["fp8" if fp8 else "matmul"],
        weights,
        config.kv_bytes_per_token(1 if fp8 else 2),
        ceilings.get("sustained", ceilings["matmul"]),
    )
