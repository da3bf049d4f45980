"""Runs batches of an encoder by another runtime: one call for the texts of a length, without padding. Knows no jobs."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.operands import Pooling
from services.worker.models.encoders.config import EncoderConfig
from services.worker.runners.base import TextTokens, Vectors
from services.worker.runners.runtime.text_session import TextCall, TextSession


class RuntimeTextRunner:
    """An `EncoderRunner` on a session: a batch is computed when it is launched."""

    depth = 1

    def __init__(self, session: TextSession, config: EncoderConfig, pooling: Pooling, most_tokens: int) -> None:
        """pooling: of a model without a head."""
        self.session, self.config, self.most_tokens = session, config, most_tokens
        self.computed_tokens = 0
        """Tokens that the runtime computed since the start: as many as the texts have."""
        self._pooling = pooling

    @property
    def width(self) -> int:
        """Numbers of each vector."""
        return len(self.config.head.labels) if self.config.head else self.config.hidden_size

    @torch.inference_mode()
    def launch(self, batch: Sequence[TextTokens], /) -> Vectors:
        """Compute a vector for each text. Raises ValueError for too many tokens."""
        lengths = [len(text.token_ids) for text in batch]
        if sum(lengths) > self.most_tokens:
            raise ValueError(f"{sum(lengths)} tokens, most are {self.most_tokens}")
        if len(batch) == 1:  # Without the 0.1 ms that sorting and copying take where the network has used the caches.
            return self._encode(batch)
        vectors: npt.NDArray[np.float32] = np.empty((len(batch), self.width), np.float32)
        for _, group in groupby(sorted(range(len(batch)), key=lengths.__getitem__), key=lengths.__getitem__):
            same = list(group)
            vectors[same] = self._encode([batch[index] for index in same])
        return vectors

    def collect(self, launched: Vectors, /) -> Vectors:
        """The vectors."""
        return launched

    def _encode(self, texts: Sequence[TextTokens]) -> Vectors:
        """The vectors of texts of one length."""
        call = _call(texts)
        self.computed_tokens += call.input_ids.numel()
        computed = self.session.compute(call)
        vectors: Vectors = (computed if self.config.head else _pool(computed, self._pooling)).numpy()
        return vectors


def _pool(hidden: Tensor, pooling: Pooling) -> Tensor:
    """[B, S, hidden] of texts of one length -> [B, hidden]."""
    if pooling is Pooling.MEAN:
        return hidden.mean(1)
    return hidden.amax(1) if pooling is Pooling.MAX else hidden[:, 0 if pooling is Pooling.CLS else -1]


def _call(texts: Sequence[TextTokens]) -> TextCall:
    """Texts of one length."""
    ids = torch.from_numpy(np.array([text.token_ids for text in texts], np.int64))
    segments = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        if text.second:
            segments[row, text.second :] = 1
    return TextCall(ids, torch.ones_like(ids), segments)
