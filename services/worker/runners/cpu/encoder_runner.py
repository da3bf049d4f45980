"""Runs batches of an encoder on a CPU: texts are packed one behind another, without padding. Knows no jobs."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.ops import PackedTexts
from services.worker.runners.base import TextTokens


class CpuEncoderRunner:
    """An `EncoderRunner` in plain torch."""

    def __init__(self, model: Encoder, most_tokens: int) -> None:
        self.model = model
        self.most_tokens = most_tokens
        self.computed_tokens = 0
        """Rows that the network computed since the start: as many as the texts have tokens."""

    @property
    def width(self) -> int:
        """Numbers of each vector."""
        return self.model.width

    @torch.inference_mode()
    def encode(self, batch: Sequence[TextTokens], /) -> npt.NDArray[np.float32]:
        """A vector for each text [B, width], pooled, or scores of labels. Raises ValueError for too many tokens."""
        tokens = sum(len(text.token_ids) for text in batch)
        if tokens > self.most_tokens:
            raise ValueError(f"{tokens} tokens, most are {self.most_tokens}")
        order = sorted(range(len(batch)), key=lambda index: len(batch[index].token_ids))
        packed = self._pack([batch[index] for index in order])
        self.computed_tokens += len(packed.token_ids)
        vectors: npt.NDArray[np.float32] = np.empty((len(batch), self.width), np.float32)
        vectors[order] = self.model.forward(packed).cpu().numpy()
        return vectors

    def _pack(self, texts: Sequence[TextTokens]) -> PackedTexts:
        lengths = [len(text.token_ids) for text in texts]
        first = list(accumulate(lengths, initial=0))[:-1]
        token_ids = np.concatenate([np.asarray(text.token_ids, np.int64) for text in texts])
        begins = np.repeat(first, lengths)
        places = np.arange(len(token_ids)) - begins
        segments = None
        if any(text.second for text in texts):
            seconds = np.repeat([text.second or length for text, length in zip(texts, lengths, strict=True)], lengths)
            segments = torch.from_numpy((places >= seconds).astype(np.int64))
        return PackedTexts(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(places + self.model.config.first_position),
            segments=segments if self.model.config.segments > 1 else None,
            first=torch.tensor(first),
            lengths=lengths,
            plan=self.model.ops.plan_packed(lengths),
        )
