"""Values that a product is called with: the norm of its inputs and the activation of its outputs. Imports no torch."""

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
    GELU = "gelu"
    """x * Phi(x), with the error function (Hendrycks and Gimpel 2016)."""
    GELU_TANH = "gelu tanh"
    """GELU with the tanh approximation of Phi."""

    @property
    def is_gated(self) -> bool:
        """Whether a row has two halves, of which one gates the other."""
        return self is Activation.GATED_SILU


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm with its weights."""

    weight: Tensor
    """[n], or [groups, n] for rows [..., groups, n] (RMS)."""
    eps: float
    kind: NormKind = NormKind.RMS
    bias: Tensor | None = None
    """[n]; LAYER only."""
