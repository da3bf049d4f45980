"""Runs batches of texts through a decoder that embeds or scores labels: packed, without padding. Knows no jobs.

Keys and values of a batch lie in blocks 1, 2, ... of a pool, which the next batch writes over. B texts, T tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.operands import Pooling
from kernels.reference.texts import pool_texts
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.runners.base import TextTokens, Vectors

Ints = npt.NDArray[np.int64]


class TextSteps(Protocol):
    """Builds the tensors of a batch on its device."""

    def __call__(self, token_ids: Ints, lengths: Ints, tables: Ints, whole: bool, /) -> StepTensors:
        """token_ids [T]; lengths [B]; tables [B, blocks]: the blocks of each text, in order. whole: the vectors of all
        tokens are wanted, else those of the last ones."""


class DecoderTextRunner:
    """An `EncoderRunner` of a decoder: a batch is computed when it is launched."""

    depth = 1

    def __init__(
        self,
        model: Decoder,
        steps: TextSteps,
        pools: list[Tensor],
        block_size: int,
        most_tokens: int,
        pooling: Pooling,
        labels: Tensor | None = None,
    ) -> None:
        """pools: pages of each layer, for `most_tokens` in blocks that no two texts share. labels [labels, hidden]: the
        head, which reads the vector of the last token; None: there is none."""
        self.model, self.pools, self.most_tokens = model, pools, most_tokens
        self._steps, self._block_size, self._pooling, self._labels = steps, block_size, pooling, labels
        self.computed_tokens = 0
        """Rows that the network computed since the start: as many as the texts have tokens."""

    @property
    def width(self) -> int:
        """Numbers of each vector."""
        return self.model.config.hidden_size if self._labels is None else len(self._labels)

    @torch.inference_mode()
    def launch(self, batch: Sequence[TextTokens], /) -> Vectors:
        """Compute a vector for each text. Raises ValueError for too many tokens."""
        lengths = np.array([len(text.token_ids) for text in batch], np.int64)
        if lengths.sum() > self.most_tokens:
            raise ValueError(f"{lengths.sum()} tokens, most are {self.most_tokens}")
        token_ids = np.concatenate([np.asarray(text.token_ids, np.int64) for text in batch])
        whole = self._pooling is not Pooling.LAST
        x, _ = self.model.forward(self._steps(token_ids, lengths, self._tables(lengths), whole), self.pools)
        self.computed_tokens += len(token_ids)
        x = self.model.ops.normalize(x, self.model.norm)
        if whole:
            starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
            x = pool_texts(x, starts.to(x.device), self._pooling)
        if self._labels is not None:
            x = torch.nn.functional.linear(x, self._labels)
        vectors: npt.NDArray[np.float32] = x.float().cpu().numpy()
        return vectors

    def collect(self, launched: Vectors, /) -> Vectors:
        """The vectors."""
        return launched

    def _tables(self, lengths: Ints) -> Ints:
        """The blocks of each text [B, blocks of the longest], behind those of the text before."""
        counts = -(-lengths // self._block_size)
        first = 1 + np.cumsum(counts) - counts
        return first[:, None] + np.arange(counts.max())
