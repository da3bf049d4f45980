"""A model loaded by the worker's code for inspection: one sequence at a time, with the output of each layer part.

Legend: T tokens, C width of the residual stream, V vocabulary.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.build.choose import build_engine
from services.worker.errors import CheckpointError
from services.worker.job import Job, SamplingParams
from services.worker.models.decoder_layer import DecoderLayer
from services.worker.options import EngineOptions
from services.worker.runners.inspection import DecoderInspection


@dataclass(frozen=True, slots=True)
class Steps:
    """The parts of one layer, computed from a residual stream [T, C]."""

    queries: Tensor
    """Before rotation [T, heads x dimension]."""
    keys: Tensor
    attention: Tensor
    """What attention adds [T, C]."""
    mlp: Tensor
    """What the MLP adds [T, C], to the given stream after attention."""


class Served:
    """One model. Sequences use the same KV blocks, one after another."""

    def __init__(self, folder: Path, longest: int, device: str = "cpu") -> None:
        """Load a checkpoint for sequences of up to `longest` tokens, in float32 on a CPU, in bfloat16 on a GPU.

        Raises CheckpointError.
        """
        self.folder = folder
        if device == "cuda" and not torch.cuda.is_available():
            raise CheckpointError("--device cuda needs a GPU that torch can use")
        options = EngineOptions(
            kv_blocks=-(-longest // 16),
            max_batch_size=1,
            max_seq_length=longest,
            step_tokens=64,
            engine="torch" if device == "cpu" else "gpu",
            dtype="float32" if device == "cpu" else "bfloat16",
            prefix_cache=False,
        )
        try:
            built = build_engine(folder, options, lambda *_: None)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self._engine, self.config, self.parameters = built.engine, built.config, built.parameters
        self.model = self._inspect([0]).model
        self.device = self.model.embedding.device

    @property
    def file_bytes(self) -> int:
        """Bytes of the weights on disk."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights in memory; a tied embedding counts once."""
        return self.model.nbytes

    @torch.inference_mode()
    def read(self, ids_T: Tensor) -> tuple[Tensor, list[Tensor]]:
        """-> the final residual stream [T, C], and the stream before each layer and before each MLP."""
        opened = self._inspect(ids_T.tolist())
        x = self.model.embed(opened.step)
        states = []
        for layer, pool in zip(self.model.layers, opened.pools, strict=True):
            states.append(x.clone())
            layer.attention(x, opened.step, pool)
            states.append(x.clone())
            layer.mlp(x)
        return x, states

    @torch.inference_mode()
    def hidden(self, x_TC: Tensor) -> Tensor:
        """The final hidden states, which the head reads: the normed stream [T, C]."""
        return self.model.ops.normalize(x_TC, self.model.norm)

    @torch.inference_mode()
    def logits(self, x_TC: Tensor) -> Tensor:
        """Logits of the next tokens [T, V], float32."""
        return self.model.logits(x_TC).float()

    def logprobs(self, x_TC: Tensor) -> Tensor:
        """Log-probabilities of the next tokens [T, V], float32."""
        return F.log_softmax(self.logits(x_TC), -1)

    @torch.inference_mode()
    def layer_steps(self, ids_T: Tensor, states: list[Tensor]) -> Iterator[Steps]:
        """The parts of each layer, computed from streams that `read` of this or another model returned."""
        opened = self._inspect(ids_T.tolist())
        for index, (layer, pool) in enumerate(zip(self.model.layers, opened.pools, strict=True)):
            before, between = states[2 * index], states[2 * index + 1]
            attended, fed = before.clone(), between.clone()
            queries, keys = _queries_keys(layer, before)
            layer.attention(attended, opened.step, pool)
            layer.mlp(fed)
            yield Steps(queries, keys, attended - before, fed - between)

    def continue_greedily(self, prompt_T: Tensor, tokens: int) -> tuple[list[int], float]:
        """-> the greedy continuation, and the mean seconds per token after the first."""
        prompt = prompt_T.tolist()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(Job(0, prompt, len(prompt), params))
        answer, times = list[int](), list[float]()
        while self._engine.has_work():
            answer += [token.token_id for token in self._engine.step().tokens]
            times += [time.perf_counter()] * (len(answer) - len(times))
        return answer, (times[-1] - times[0]) / (tokens - 1)

    def _inspect(self, token_ids: list[int]) -> DecoderInspection:
        opened = self._engine.runner.inspect(token_ids)
        assert isinstance(opened, DecoderInspection), type(opened).__name__
        return opened


def _queries_keys(layer: DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    attention = layer.attention
    qkv = attention.qkv.norm_matmul(x, attention.norm)
    heads = attention.heads * attention.head_dim
    return qkv[:, :heads], qkv[:, heads : heads + attention.kv_heads * attention.head_dim]
