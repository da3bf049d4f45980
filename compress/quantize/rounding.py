"""Rounds weights to INT8, INT4 and FP8, with scales found by calibration. Knows one weight at a time, never a network.

Legend: N outputs, K inputs, B groups of a row, G inputs of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.choices import Granularity
from kernels.quantized_weights import FP8, FP8_BLOCK, FP8_MAX, INT4_ZERO, Fp8Weight, Int4Weight, Int8Weight, pack_int4

_TINY = 1e-8
_KEEPS = tuple(1 - 0.04 * step for step in range(8))
"""Shares of a group's range that are tried: clipping the range makes the steps finer."""


def as_written(scale: Tensor) -> Tensor:
    """A scale as stored in the checkpoint (bf16), in float32: weights must be rounded to the stored steps."""
    return scale.bfloat16().float()


# ---- int8 ----


def round_int8(weight_NK: Tensor, *, per_tensor: bool = False, dynamic: bool = False) -> Int8Weight:
    """Round to the nearest of 255 steps between -max and max of each output, or of the whole weight."""
    largest = weight_NK.abs().amax().expand(len(weight_NK), 1) if per_tensor else weight_NK.abs().amax(1, keepdim=True)
    scale = as_written(largest.clamp_min(_TINY) / 127)
    values = (weight_NK / scale).round().clamp(-127, 127).to(torch.int8)
    return Int8Weight(values, scale.contiguous(), dynamic_activations=dynamic)


# ---- int4 ----


@dataclass(frozen=True, slots=True)
class Steps:
    """The 16 numbers that each group is rounded to: (q - zero) * scale for q in 0..15."""

    scale: Tensor
    """float32 [N, B, 1], as stored."""
    zero: Tensor
    """float32 [N, B, 1], integers in 0..15."""

    def of(self, groups: Tensor | slice) -> "Steps":
        """The steps of these groups, in this order."""
        return Steps(self.scale[:, groups], self.zero[:, groups])

    @staticmethod
    def joined(parts: Sequence["Steps"]) -> "Steps":
        """Concatenate groups."""
        return Steps(torch.cat([part.scale for part in parts], 1), torch.cat([part.zero for part in parts], 1))

    def nearest(self, weight_NBG: Tensor) -> Tensor:
        """q in 0..15, float32 [N, B, G]."""
        return (weight_NBG / self.scale + self.zero).round().clamp(0, 15)

    def numbers(self, q_NBG: Tensor) -> Tensor:
        """The numbers of these q."""
        return (q_NBG - self.zero) * self.scale

    def rounded(self, weight_NBG: Tensor) -> Tensor:
        """The weight rounded to nearest."""
        return self.numbers(self.nearest(weight_NBG))


def grouped(weight_NK: Tensor, group: int) -> Tensor:
    """A weight [N, K] as [N, B, G]."""
    return weight_NK.reshape(len(weight_NK), -1, group)


def steps_of(weight_NBG: Tensor, symmetric: bool, keep: Tensor | float = 1.0) -> Steps:
    """Steps that span each group's range, shrunk by `keep` (a number, or [N, B, 1]); symmetric ones have zero 8."""
    if symmetric:
        scale = weight_NBG.abs().amax(2, keepdim=True) * keep / 7.5
        return Steps(as_written(scale.clamp_min(_TINY)), torch.full_like(scale, INT4_ZERO))
    low = weight_NBG.amin(2, keepdim=True).clamp_max(0) * keep
    high = weight_NBG.amax(2, keepdim=True).clamp_min(0) * keep
    scale = as_written(((high - low) / 15).clamp_min(_TINY))
    return Steps(scale, (-low / scale).round().clamp(0, 15))


def cheapest_steps(weight_NBG: Tensor, symmetric: bool, worth_BG: Tensor) -> Steps:
    """Steps over the share of each group's range with the least sum of squared errors, weighted by the inputs'
    moments."""
    best = torch.full_like(weight_NBG[..., :1], torch.inf)
    keep = torch.ones_like(best)
    for share in _KEEPS:
        off = steps_of(weight_NBG, symmetric, share).rounded(weight_NBG) - weight_NBG
        error = (off.square() * worth_BG).sum(2, keepdim=True)
        keep = torch.where(error < best, share, keep)
        best = torch.minimum(error, best)
    return steps_of(weight_NBG, symmetric, keep)


def int4_weight(q_NBG: Tensor, steps: Steps, symmetric: bool) -> Int4Weight:
    """The stored weight of these q."""
    zero = None if symmetric else steps.zero.squeeze(2).to(torch.uint8)
    q = q_NBG.flatten(1).to(torch.uint8)
    return Int4Weight(pack_int4(q), steps.scale.squeeze(2).bfloat16(), zero, q_NBG.shape[2])


# ---- fp8 ----


def round_fp8(weight_NK: Tensor, granularity: Granularity, input_scale: Tensor | None = None) -> Fp8Weight:
    """Round to the nearest e4m3 number, with a scale per `channel` (output), `tensor`, or `block` of 128 x 128."""
    sizes = weight_NK.abs()
    if granularity is Granularity.TENSOR:
        largest = sizes.amax().view(1, 1)
    elif granularity is Granularity.CHANNEL:
        largest = sizes.amax(1, keepdim=True)
    else:
        largest = _block_maxima(sizes)
    scale = as_written(largest.clamp_min(_TINY) / FP8_MAX)
    spread = scale
    if granularity is Granularity.BLOCK:
        spread = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        spread = spread[: weight_NK.shape[0], : weight_NK.shape[1]]
    return Fp8Weight((weight_NK / spread).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale, input_scale)


def _block_maxima(sizes_NK: Tensor) -> Tensor:
    rows, columns = (-(-n // FP8_BLOCK) for n in sizes_NK.shape)
    padded = sizes_NK.new_zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[: sizes_NK.shape[0], : sizes_NK.shape[1]] = sizes_NK
    return padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK).amax((1, 3))
