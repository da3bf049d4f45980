"""The tensors of a batch of texts on a GPU, for a decoder that embeds. Knows places of tokens, no jobs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import attention
from kernels.attention import AttentionPlan
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.decoder_texts import Ints


class GpuTextSteps:
    """`TextSteps` for the kernels of a step, which is not captured as a graph."""

    def __init__(self, model: Decoder, ops: TritonOps, block_size: int, stored: torch.dtype) -> None:
        """stored: the format of keys and values."""
        self._model, self._ops, self._block_size, self._stored = model, ops, block_size, stored

    def __call__(self, token_ids: Ints, lengths: Ints, tables: Ints, whole: bool, /) -> StepTensors:
        """As in `TextSteps`."""
        size, model = self._block_size, self._model
        starts = np.concatenate([[0], np.cumsum(lengths)])
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(token_ids)) - starts[row_of]
        positions = self._send(places)
        long_tokens = int(lengths[lengths > self._ops.short_tokens].sum())
        rows = (self._send(starts, torch.int32), self._send(lengths, torch.int32), self._send(tables, torch.int32))
        return StepTensors(
            token_ids=self._send(token_ids),
            positions=positions,
            ropes=model.ropes(lambda cos, sin: RopeTables(cos, sin, positions)),
            slot_mapping=self._send(tables[row_of, places // size] * size + places % size),
            plans={window: self._plan(*rows, window, long_tokens) for window in set(model.config.windows)},
            sampled=None if whole else self._send(starts[1:] - 1),
        )

    def _plan(
        self, starts: Tensor, contexts: Tensor, tables: Tensor, window: int | None, long_tokens: int
    ) -> AttentionPlan:
        config, dtype, ops = self._model.config, self._model.embedding.dtype, self._ops
        shapes = attention.config_for(
            config.head_dim, dtype, len(contexts), ops.invariant, self._stored, ops.short_tokens
        )
        return attention.plan_attention(
            starts, contexts, tables, config.heads, config.kv_heads, config.head_dim, self._block_size, dtype, window,
            ops.short_tokens, long_tokens, shapes, config.has_plain_scores,
        )  # fmt: skip

    def _send(self, array: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.embedding.device, dtype)
