"""Rounds contents of blocks to fp8 for a slow link. Knows numbers in a row, not which layer, head or token they are of.

It therefore rounds blocks of several ranks in the same way. Each number in fp8 has an exponent of its own, so it
matters little which numbers share a scale, as long as the largest one fits.

    C numbers of a block, or of some of its layers    G groups of 64 numbers, the last one filled up with zeros
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.kv_pages import FP8, LARGEST
from services.security.frames import FrameError

GROUP = 64
"""Numbers that share a scale."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SMALLEST = 2.0**-100
"""The scale of a group fits at least this number: that of zeros is finite, too."""
_ROUNDED_UP = 17 / 16
"""The largest number of a format may become larger by so much."""


@dataclass(frozen=True, slots=True)
class Fp8Rounding:
    """A `Rounding`. Rounded contents are an exponent for each group, int8 [G], and then its numbers, float8_e4m3fn [C],
    each divided by 2 to the power of its group's exponent.

    Powers of two keep the numbers' bits: what was rounded before is not changed again, and expands without an error in
    every format of a pool, unless it is too small for float16.
    """

    dtype: torch.dtype
    """The pool's format: float32, bfloat16 or float16."""
    numbers: int
    """Of a block: C."""

    @property
    def rounded_bytes(self) -> int:
        """Bytes of the rounded contents of a block."""
        return _rounded_bytes(self.numbers)

    def round(self, contents: bytes) -> bytes:
        """From the pool's format to fp8: a number changes by at most 1/16, or 2^-17 of the largest one of its group."""
        numbers = torch.frombuffer(bytearray(contents), dtype=self.dtype).float()
        groups_GX = _groups(numbers)
        largest_G = groups_GX.abs().amax(1).clamp(_SMALLEST)
        exponents_G = torch.log2(largest_G * (1 / LARGEST[FP8])).ceil().nan_to_num(127).clamp(max=127)
        scaled_GX = groups_GX * torch.exp2(-exponents_G)[:, None]
        return _bytes(exponents_G.to(torch.int8)) + _bytes(scaled_GX.flatten()[: len(numbers)].to(FP8))

    def expand(self, rounded: bytes) -> bytes:
        """From fp8 to the pool's format. Raises FrameError for what `round` has not made of finite numbers."""
        count = len(rounded) * GROUP // (GROUP + 1)
        if not 0 < len(rounded) == _rounded_bytes(count) <= self.rounded_bytes:
            raise FrameError("a rounded block of another size")
        received = torch.frombuffer(bytearray(rounded), dtype=torch.uint8)
        exponents_G = received[:-count].view(torch.int8)
        groups_GX = _groups(received[-count:].view(FP8).float())
        numbers = (groups_GX * torch.exp2(exponents_G.float())[:, None]).flatten()[:count]
        limit = torch.finfo(self.dtype).max
        if not float(numbers.abs().amax()) <= _ROUNDED_UP * limit:  # True of NaN, too
            raise FrameError("numbers or scales that no pool has")
        return _bytes(numbers.clamp_(-limit, limit).to(self.dtype))


def _rounded_bytes(numbers: int) -> int:
    return -(-numbers // GROUP) + numbers


def _groups(numbers: Tensor) -> Tensor:
    """[C] as [G, 64]."""
    return pad(numbers, (0, -len(numbers) % GROUP)).view(-1, GROUP)


def rounding_of(dtype: str, block_bytes: int) -> Fp8Rounding | None:
    """The rounding of blocks of this size. dtype: torch's name for the type of their numbers. None for types that have
    8 bits already."""
    found = _DTYPES.get(dtype)
    return None if found is None else Fp8Rounding(found, block_bytes // found.itemsize)


def _bytes(numbers: Tensor) -> bytes:
    return numbers.view(torch.uint8).numpy().tobytes()
