"""Values that operations are called with: norms, activations, poolings, the scores of attention. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class NormKind(Enum):
    """How a row is normalized."""

    RMS = "rms"
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""
    LAYER = "layer"
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba, Kiros and Hinton 2016)."""


class Activation(Enum):
    """What follows the first projection of an MLP."""

    GATED_SILU = "gated silu"
    """silu(first half of a row) * second half (Shazeer 2020)."""
    GATED_GELU_TANH = "gated gelu tanh"
    """gelu(first half of a row) * second half, with the tanh approximation."""
    GELU = "gelu"
    """x * Phi(x), with the error function (Hendrycks and Gimpel 2016)."""
    GELU_TANH = "gelu tanh"
    """GELU with the tanh approximation of Phi."""

    @property
    def is_gated(self) -> bool:
        """Whether a row has two halves, of which one gates the other."""
        return self in (Activation.GATED_SILU, Activation.GATED_GELU_TANH)


class Pooling(Enum):
    """How the vectors of a text's tokens become one."""

    MEAN = "mean"
    CLS = "cls"
    """That of the first token."""
    LAST = "last"
    """That of the last token."""
    MAX = "max"
    """The largest number of each dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm with its weights."""

    weight: Tensor
    """[n], or [groups, n] for rows [..., groups, n] (RMS)."""
    eps: float
    kind: NormKind = NormKind.RMS
    bias: Tensor | None = None
    """[n]; LAYER only."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How the products of queries and keys become the scores whose softmax weights the values."""

    scale: float
    """Factor of the products."""
    soft_cap: float | None = None
    """A score x becomes soft_cap * tanh(x / soft_cap), so that none exceeds the cap (Gemma Team 2024)."""
    sinks: Tensor | None = None
    """float32 [H]: for each query head the score of a key that every query sees and that has no value (Xiao et al.
    2023); None: there is none."""

    @property
    def is_plain(self) -> bool:
        """Whether the scores are the scaled products alone."""
        return self.soft_cap is None and self.sinks is None
