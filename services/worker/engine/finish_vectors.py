"""What is done to an encoder's vectors before they leave: fewer dimensions, length 1, shares of labels. Pure numpy."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from services.worker.job import EncodeTask, Vectors

ScoreKind = Literal["sigmoid", "softmax"]
"""Each label has a share of its own, or the shares of a text's labels add up to 1."""
_LEAST_LENGTH = 1e-12


def finished(vectors: npt.NDArray[np.float32], task: EncodeTask, scores: ScoreKind | None) -> Vectors:
    """The vectors [n, width] as the task asks for them; scores: of labels, before any sigmoid or softmax."""
    if scores == "sigmoid":
        vectors = np.exp(-np.logaddexp(0, -vectors))
    elif scores == "softmax":
        powers = np.exp(vectors - vectors.max(axis=1, keepdims=True))
        vectors = powers / powers.sum(axis=1, keepdims=True)
    if task.dimensions:
        vectors = vectors[:, : task.dimensions]
    if task.normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, _LEAST_LENGTH)
    return Vectors(vectors.shape[1], np.ascontiguousarray(vectors, "<f4").tobytes())
