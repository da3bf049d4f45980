"""Launches of the Hopper kernel for many rows and weights of four bits: which tiles, and how programs share them.

M rows of x, N outputs, C chunks of 128 inputs; `kernels.products.words_prompts` is the kernel.
"""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from kernels.device import processors
from kernels.products.gluon_parts import described
from kernels.products.skinny import workspace
from kernels.products.words import CHUNK, Words
from kernels.products.words_prompts import prompt_words_kernel


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a product's tiles."""

    block_m: int
    """Rows of x."""
    stages: int
    """Panels of 64 columns of x that are on their way, or being multiplied."""
    ring: int
    """Chunks of words, likewise."""


FEW = 2112
"""Chunks of a product that make 16 for each multiprocessor."""
WIDE, NARROW = Shape(256, 6, 3), Shape(128, 10, 6)


def shape_for(rows: int, n: int, k: int) -> Shape:
    """The shape for x [rows, k] times W [n, k]. Words are turned into floats again for each tile, so narrow ones cost a
    quarter more; they are for rows that wide ones would not fill, and for few chunks, where the parts of shared tiles
    cost more than that. Measured on one H200."""
    chunks = triton.cdiv(n, 128) * triton.cdiv(rows, WIDE.block_m) * triton.cdiv(k, CHUNK)
    return NARROW if rows <= 128 or 256 < rows <= 384 or chunks < FEW else WIDE


BAND = 8
"""Tiles of x that programs take with all rows of W before they go on to the next: 132 programs read 8 of those and 16
of W at a time, so that x, four times as many bytes as words are, comes from the L2. Measured on one H200: 4 and 8 are
equal."""
SHARING = 6
"""What sharing tiles costs a program, in the time of chunks."""


def share(tiles: int, chunks: int, processors: int) -> tuple[int, int]:
    """How many tiles have a program of their own, and how many chunks of the others each program takes."""
    rest = tiles % processors
    if rest == 0 or (processors - rest) * chunks <= SHARING * processors:
        return tiles, 1
    even, equal = triton.cdiv(chunks, processors // rest), triton.cdiv(rest * chunks, processors)
    if 10 * even <= 11 * equal:  # programs that read the same columns of x at the same time
        return tiles - rest, even
    if tiles > processors and 2 * rest <= processors:  # a tile with few parts is better than one with many
        rest += processors
    return tiles - rest, triton.cdiv(rest * chunks, processors)


def linear(
    x: Tensor, weight: Words, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor, shape: Shape
) -> None:
    """As `matmul_words.linear_words`, of at least one row."""
    grid, arguments = launch(x, weight, bias, residual, gated, out, shape, processors(x.device))
    prompt_words_kernel[grid](**arguments, launch_pdl=True)


def launch(
    x: Tensor, weight: Words, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor, shape: Shape,
    processors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """The grid and the arguments of the kernel."""
    (rows, n), chunks = out.shape, weight.chunks
    down = triton.cdiv(rows, shape.block_m)
    across = triton.cdiv(n, 64 if gated else 128)
    tiles = across * down
    alone, span = share(tiles, chunks, processors)
    units = (tiles - alone) * chunks
    programs = processors if tiles >= processors else triton.cdiv(units, span) if units else tiles
    space = workspace(x.device, programs * 2 * shape.block_m * 64)
    arguments = {
        "x": described(x, shape.block_m, 64), "words": described(weight.words.view(-1, 16), 64, 16),
        "scales": weight.scale, "zeros": weight.zero, "bias": bias, "residual": residual, "out": out,
        "parts": space.parts, "arrived": space.arrived, "M": rows, "N": n, "C": chunks,
        "groups": weight.scale.shape[1], "alone": alone, "span": span, "units": units, "down": down,
        "band": min(BAND, down), "across": across,
        "GROUP": weight.group, "GATED": gated, "BLOCK_M": shape.block_m, "STAGES": shape.stages, "RING": shape.ring,
        "num_warps": 4,
    }  # fmt: skip
    return (programs,), arguments
