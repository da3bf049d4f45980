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
from services.worker.runners.cpu.encoder_ops import CpuEncoderOps
from services.worker.runners.runtime.text_session import TextCall, TextSession


class RuntimeTextRunner:
    """An `EncoderRunner` on a session: a batch is computed when it is launched."""

    depth = 1

    def __init__(self, session: TextSession, config: EncoderConfig, pooling: Pooling, most_tokens: int) -> None:
        """pooling: of a model without a head."""
        self.session, self.config, self.most_tokens = session, config, most_tokens
        self.computed_tokens = 0
        """Tokens that the runtime computed since the start: as many as the texts have."""
        self._pooling, self._ops = pooling, CpuEncoderOps()

    @property
    def width(self) -> int:
        """Numbers of each vector."""
        return len(self.config.head.labels) if self.config.head else self.config.hidden_size

    @torch.inference_mode()
    def launch(self, batch: Sequence[TextTokens], /) -> Vectors:
        """Compute a vector for each text. Raises ValueError for too many tokens."""
        tokens = sum(len(text.token_ids) for text in batch)
        if tokens > self.most_tokens:
            raise ValueError(f"{tokens} tokens, most are {self.most_tokens}")
        vectors: npt.NDArray[np.float32] = np.empty((len(batch), self.width), np.float32)

        def length_of(index: int) -> int:
            return len(batch[index].token_ids)

        for _, group in groupby(sorted(range(len(batch)), key=length_of), key=length_of):
            same = list(group)
            call = _call([batch[index] for index in same])
            self.computed_tokens += call.input_ids.numel()
            vectors[same] = self._vectors(self.session.compute(call)).numpy()
        return vectors

    def collect(self, launched: Vectors, /) -> Vectors:
        """The vectors."""
        return launched

    def _vectors(self, computed: Tensor) -> Tensor:
        """Hidden states [B, S, hidden] or scores [B, labels] -> [B, width]."""
        if self.config.head:
            return computed
        texts, length, _ = computed.shape
        return self._ops.pool(computed.flatten(0, 1), torch.arange(texts + 1) * length, self._pooling)


def _call(texts: Sequence[TextTokens]) -> TextCall:
    """Texts of one length."""
    ids = torch.from_numpy(np.stack([np.asarray(text.token_ids, np.int64) for text in texts]))
    segments = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        if text.second:
            segments[row, text.second :] = 1
    return TextCall(ids, torch.ones_like(ids), segments)
