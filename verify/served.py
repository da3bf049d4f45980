"""A checkpoint as the CPU worker serves it, opened up: one sequence at a time, with what each layer adds.

Legend: T tokens, C width of the residual stream, V vocabulary.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.assembly import assemble
from services.worker.job import EngineOptions
from services.worker.layers import DecoderLayer, StepTensors
from services.worker.ops import Rotation
from services.worker.runner import CpuRunner


@dataclass(frozen=True, slots=True)
class Steps:
    """What one layer makes of a residual stream [T, C]."""

    queries: Tensor
    """Before they are rotated [T, heads x dimension]."""
    keys: Tensor
    attention: Tensor
    """What attention adds [T, C]."""
    mlp: Tensor
    """What the MLP adds [T, C], to the stream after the attention that was given."""


class Served:
    """One model. Sequences are read into the same blocks, one after another."""

    def __init__(self, folder: Path, longest: int) -> None:
        """Load a checkpoint for sequences of up to `longest` tokens. Raises CheckpointError."""
        self.folder = folder
        options = EngineOptions(kv_blocks=-(-longest // 16), max_batch_size=1, max_seq_length=longest)
        parts = assemble(folder, options, lambda *_: None)
        assert isinstance(parts.runner, CpuRunner)
        self.config, self.parameters = parts.config, parts.parameters
        self._runner, self.model = parts.runner, parts.runner.model

    @property
    def file_bytes(self) -> int:
        """Bytes of the weights' files."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights as they are served; the embedding counts once where it is the head too."""
        model = self.model
        weights = [model.embedding, model.norm, *([] if self.config.tied_embeddings else [model.head.weight])]
        for layer in model.layers:
            linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
            weights += [layer.attention.norm, layer.mlp.norm, *(linear.weight for linear in linears)]
            weights += [linear.bias for linear in linears if linear.bias is not None]
        return sum(weight.nbytes for weight in weights)

    @torch.inference_mode()
    def read(self, ids_T: Tensor) -> tuple[Tensor, list[Tensor]]:
        """-> the residual stream at the end [T, C], and as it was before each layer and before each MLP."""
        step, x = self._step(ids_T, 0), self.model.embedding[ids_T]
        states = []
        for layer, pool in zip(self.model.layers, self._runner.pools, strict=True):
            states.append(x.clone())
            layer.attention(x, step, pool)
            states.append(x.clone())
            layer.mlp(x)
        return x, states

    @torch.inference_mode()
    def hidden(self, x_TC: Tensor) -> Tensor:
        """The final hidden states, which the head reads: the normed stream [T, C]."""
        return self.model.ops.rms_norm(x_TC, self.model.norm, self.config.norm_eps)

    @torch.inference_mode()
    def logprobs(self, x_TC: Tensor) -> Tensor:
        """Of the next tokens [T, V], float32."""
        return F.log_softmax(self.model.logits(x_TC).float(), -1)

    @torch.inference_mode()
    def layer_steps(self, ids_T: Tensor, states: list[Tensor]) -> Iterator[Steps]:
        """What each layer makes of given streams, as `read` tells them, be they this model's or another's."""
        step = self._step(ids_T, 0)
        for index, (layer, pool) in enumerate(zip(self.model.layers, self._runner.pools, strict=True)):
            before, between = states[2 * index], states[2 * index + 1]
            attended, fed = before.clone(), between.clone()
            queries, keys = _queries_keys(layer, before)
            layer.attention(attended, step, pool)
            layer.mlp(fed)
            yield Steps(queries, keys, attended - before, fed - between)

    @torch.inference_mode()
    def continue_greedily(self, prompt_T: Tensor, tokens: int) -> tuple[list[int], float]:
        """-> the likeliest tokens one after another, and the seconds that each took after the first."""
        chosen = self._next(prompt_T, 0)
        answer, began = [chosen], time.perf_counter()
        for position in range(len(prompt_T), len(prompt_T) + tokens - 1):
            chosen = self._next(torch.tensor([chosen]), position)
            answer.append(chosen)
        return answer, (time.perf_counter() - began) / (tokens - 1)

    def _next(self, ids_T: Tensor, start: int) -> int:
        x = self.model.forward(self._step(ids_T, start), self._runner.pools)
        return int(self.model.logits(x[-1:]).argmax())

    def _step(self, ids_T: Tensor, start: int) -> StepTensors:
        """One row: the tokens of a sequence from `start` on. Block 0 is nobody's."""
        count, size = len(ids_T), self._runner.block_size
        table = np.arange(1, -(-(start + count) // size) + 1)[None]
        positions = np.arange(start, start + count)
        at = torch.from_numpy(positions)
        lengths, contexts = np.array([count]), np.array([start + count])
        plan, dtype = self._runner.ops.plan_attention, self.model.embedding.dtype
        return StepTensors(
            token_ids=ids_T,
            rotation=Rotation(self.model.cos[at], self.model.sin[at]),
            places=torch.from_numpy(table[0, positions // size] * size + positions % size),
            plans={w: plan(lengths, contexts, table, size, w, dtype) for w in set(self.config.windows)},
            sampled=torch.tensor([count - 1]),
        )


def _queries_keys(layer: DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    attention = layer.attention
    qkv = attention.qkv.of_normed(x, attention.norm, attention.eps)
    heads = attention.heads * attention.head_dim
    return qkv[:, :heads], qkv[:, heads : heads + attention.kv_heads * attention.head_dim]
