"""Runs batches of texts through a decoder that embeds or scores labels, on a CPU: packed, unpadded. Knows no jobs.

Keys and values of a batch lie in blocks 1, 2, ... of a pool, which the next batch writes over. B texts, T tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.operands import Pooling
from kernels.reference.texts import pool_texts
from services.worker.runners.base import TextTokens, Vectors
from services.worker.runners.cpu.steps import StepBuilder

Ints = npt.NDArray[np.int64]


class DecoderTextRunner:
    """An `EncoderRunner` of a decoder: a batch is computed when it is launched."""

    depth = 1

    def __init__(
        self, steps: StepBuilder, pools: list[Tensor], most_tokens: int, pooling: Pooling, labels: Tensor | None = None
    ) -> None:
        """pools: pages of each layer, for `most_tokens` in blocks that no two texts share. labels [labels, hidden]: the
        head, which reads the vector of the last token; None: there is none."""
        self.model, self.pools, self.most_tokens = steps.model, pools, most_tokens
        self._steps, self._pooling, self._labels = steps, pooling, labels
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
        samples = lengths if whole else np.ones_like(lengths)
        step = self._steps.build(token_ids, lengths, lengths, self._tables(lengths), samples)
        x, _ = self.model.forward(step, self.pools)
        self.computed_tokens += len(token_ids)
        x = self.model.ops.normalize(x, self.model.norm)
        if whole:
            x = pool_texts(x, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])), self._pooling)
        if self._labels is not None:
            x = torch.nn.functional.linear(x, self._labels)
        vectors: npt.NDArray[np.float32] = x.float().numpy()
        return vectors

    def collect(self, launched: Vectors, /) -> Vectors:
        """The vectors."""
        return launched

    def _tables(self, lengths: Ints) -> Ints:
        """The blocks of each text [B, blocks of the longest], behind those of the text before."""
        counts = -(-lengths // self._steps.block_size)
        first = 1 + np.cumsum(counts) - counts
        return first[:, None] + np.arange(counts.max())
