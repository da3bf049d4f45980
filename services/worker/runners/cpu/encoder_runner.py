"""Runs batches of an encoder on a CPU: texts are packed one behind another, without padding. Knows no jobs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.reference.texts import equal_texts
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.ops import PackedTexts
from services.worker.runners.base import TextTokens, Vectors
from services.worker.runners.packed_ids import pack


class CpuEncoderRunner:
    """An `EncoderRunner` in plain torch: a batch is computed when it is launched."""

    depth = 1

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
    def launch(self, batch: Sequence[TextTokens], /) -> Vectors:
        """Compute a vector for each text. Raises ValueError for too many tokens."""
        tokens = sum(len(text.token_ids) for text in batch)
        if tokens > self.most_tokens:
            raise ValueError(f"{tokens} tokens, most are {self.most_tokens}")
        order = sorted(range(len(batch)), key=lambda index: len(batch[index].token_ids))
        packed = self._pack([batch[index] for index in order])
        self.computed_tokens += len(packed.token_ids)
        vectors: npt.NDArray[np.float32] = np.empty((len(batch), self.width), np.float32)
        vectors[order] = self.model.forward(packed).numpy()
        return vectors

    def collect(self, launched: Vectors, /) -> Vectors:
        """The vectors."""
        return launched

    def _pack(self, texts: Sequence[TextTokens]) -> PackedTexts:
        """The texts, whose lengths ascend."""
        config = self.model.config
        packed = pack(texts, config.first_position)
        has_segments = packed.segments is not None and config.segments > 1
        return PackedTexts(
            token_ids=torch.from_numpy(packed.token_ids),
            positions=torch.from_numpy(packed.positions),
            segments=torch.from_numpy(packed.segments) if has_segments else None,
            starts=torch.from_numpy(packed.starts),
            plan=equal_texts([len(text.token_ids) for text in texts]),
        )
