"""Tiles of the rows of experts: which expert and which of its rows a program computes, and how many programs suffice.

E experts    k experts that compute a token    entry t * k + i
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.activation import gelu_argument
from kernels.moe.reference import Routes


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


@triton.jit
def tile_of(offsets, blocks, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The program's work: whether there is any, which of `blocks` blocks of outputs, the expert, and its tile's first
    place and the end of the expert's. All tiles of a block come before those of the next one, programs without work
    last."""
    experts = tl.arange(0, BLOCK_E)
    first = tl.load(offsets + experts, mask=experts < E, other=0)
    stop = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    tiles = tl.cdiv(stop - first, BLOCK_M)
    end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles)
    block = tl.program_id(0) // tl.maximum(total, 1)
    index = tl.program_id(0) - block * total
    here = (end - tiles <= index) & (index < end)
    expert = tl.sum(tl.where(here, experts, 0))
    place = tl.sum(tl.where(here, first + (index - end + tiles) * BLOCK_M, 0))
    return tl.program_id(0) < total * blocks, block, expert, place, tl.sum(tl.where(here, stop, 0))


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """The activation of the gates times the others; GATE: silu or gelu."""
    return gate * tl.sigmoid(gelu_argument(gate) if GATE == "gelu" else gate) * up


def expected_entries(routes: Routes) -> int:
    """The entries of own experts, if each expert is as likely."""
    return -(-len(routes.order) * routes.own // routes.experts)


def expected_tiles(routes: Routes, tile: Tile) -> int:
    """The tiles of `expected_entries`."""
    return _tiles(expected_entries(routes), routes.own, tile)


def most_tiles(routes: Routes, tile: Tile) -> int:
    """The most tiles that own experts can have: a token chooses an expert once."""
    tokens, chosen = routes.weights_Tk.shape
    return _tiles(tokens * min(chosen, routes.own), routes.own, tile)


def _tiles(entries: int, experts: int, tile: Tile) -> int:
    """Each expert has at most one tile that is not full."""
    return min(entries, entries // tile.rows + min(entries, experts))
