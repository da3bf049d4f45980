"""The tables by which positions rotate queries and keys. Knows no config.json and no device."""

import math

import torch
from torch import Tensor

from services.worker.models.config import LearnedPositions
from services.worker.models.rope_settings import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling


def rope_tables(
    positions: Rope | LearnedPositions, head_dim: int, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 to count - 1, both [count, 1, head_dim], the first half of sin negated.

    Learned positions rotate nothing: cos is 1 and sin is 0. The tables are made on the CPU, so that every device
    rotates by the same numbers.
    """
    with torch.device("cpu"):
        if not isinstance(positions, Rope):
            return torch.ones(count, 1, head_dim, dtype=dtype), torch.zeros(count, 1, head_dim, dtype=dtype)
        frequencies, magnitude = _frequencies(positions, head_dim, count)
        angles = torch.outer(torch.arange(count).float(), frequencies)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _frequencies(rope: Rope, head_dim: int, count: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the factor of cos and sin."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = 1.0 / powers
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case Llama3Scaling():
            return _llama3_frequencies(frequencies, rope.scaling), 1.0
        case YarnScaling():
            return _yarn_frequencies(powers, rope.theta, rope.scaling), rope.scaling.attention_factor
        case LongRopeScaling():
            scaling = rope.scaling
            # A worker whose sequences may be long rotates all of them by the long factors: keys stay valid as they are.
            factors = scaling.long_factors if count > scaling.original_context else scaling.short_factors
            return 1.0 / (torch.tensor(factors) * powers), scaling.attention_factor


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch long wavelengths, keep short ones, and blend those between."""
    wavelengths = 2 * torch.pi / frequencies
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def _yarn_frequencies(powers: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Stretch frequencies of few rotations, keep those of many, and blend those between by dimension."""

    def dimension(rotations: float) -> float:
        """Where a frequency turns so often within the original context."""
        return 2 * len(powers) * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(powers) - 1)
    ramp = (torch.arange(len(powers), dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1 - kept) / (scaling.factor * powers) + kept / powers
