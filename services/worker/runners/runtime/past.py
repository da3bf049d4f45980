"""Keys and values of slots, for runtimes that want them dense: rows that are computed together lie in one buffer.

Knows slots and lengths, no runtime. Legend: R rows of a group, C places of each, L layers, K key/value heads, D head
dimension. A row's tokens are at places 0, 1, ...; the places behind them are zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.runners.cpu.kv_pool import CpuPool

Ints = npt.NDArray[np.int64]

GRANULE = 64
"""Places by which buffers grow: a step reads all of them, so one copy in `GRANULE` steps costs 3% of the reading."""

_FEW = 8
"""Rows that are stored one by one: 10 us each, where indices for all take 200."""


@dataclass(frozen=True, slots=True)
class PastShape:
    """The shape of one token's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PastGroup:
    """Slots whose rows are computed together."""

    slots: tuple[int, ...]
    buffer: Tensor
    """[2L, R, K, C, D]: keys and values of each layer in turn."""

    @property
    def places(self) -> int:
        """C."""
        return self.buffer.shape[3]

    def append(self, starts: Tensor, new: Tensor) -> None:
        """Store the keys and values [2L, R, K, S, D] of S new tokens of each row, from places `starts` [R] on. The
        buffer has these places."""
        if len(self.slots) <= _FEW:
            for row, start in enumerate(starts.tolist()):
                self.buffer[:, row, :, start : start + new.shape[3]] = new[:, row]
            return
        places = starts[:, None] + torch.arange(new.shape[3])
        rows = torch.arange(len(self.slots))[:, None]
        self.buffer.transpose(2, 3)[:, rows, places] = new.transpose(2, 3)


class PastStore:
    """The groups of all slots. Their tokens are in the blocks of a pool, too: a group may be made anew at any time."""

    def __init__(self, shape: PastShape, pool: CpuPool, block_size: int) -> None:
        self.shape, self.block_size = shape, block_size
        self._pool = pool
        self._groups: dict[int, PastGroup] = {}
        """The group of each slot that has one."""

    def release(self, slot: int) -> None:
        """Forget the group of a slot."""
        self._groups.pop(slot, None)

    def gather(self, slots: Sequence[int], tables: Ints, computed: Sequence[int], longest: int) -> PastGroup:
        """The group of exactly these slots, in this order, with room for `longest` tokens of each; its rows are read
        from the pool unless they lie together already. tables [R, blocks]: the blocks of each slot; computed [R]:
        tokens that are stored of each."""
        wanted = tuple(slots)
        held = self.held(wanted)
        if held is not None and held.places >= longest:
            return held
        held = None
        for slot in wanted:  # Before the new group takes memory.
            self.release(slot)
        group = PastGroup(wanted, empty_buffer(self.shape, len(wanted), longest))
        for row, (table, tokens) in enumerate(zip(tables, computed, strict=True)):
            if tokens:
                self._read(group.buffer[:, row, :, :tokens], table[: -(-tokens // self.block_size)])
        self._groups.update(dict.fromkeys(wanted, group))
        return group

    def held(self, slots: tuple[int, ...]) -> PastGroup | None:
        """The group of exactly these slots, in this order, if they lie together."""
        first = self._groups.get(slots[0])
        if first is None or first.slots != slots:
            return None
        return first if all(self._groups.get(slot) is first for slot in slots) else None

    def store(self, tables: Ints, starts: Ints, new: Tensor) -> None:
        """Write the keys and values [2L, R, K, S, D] of S new tokens of each row to the pool. tables [R, blocks];
        starts [R]: the place of each row's first new token."""
        places = starts[:, None] + np.arange(new.shape[3])
        blocks = np.take_along_axis(tables, places // self.block_size, 1)
        slots = torch.from_numpy((blocks * self.block_size + places % self.block_size).ravel())
        both = new.view(-1, 2, *new.shape[1:]).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [L, R * S, 2, K, D]
        for layer, part in zip(self._pool.layers, both.to(self._pool.layers[0].dtype), strict=True):
            layer.flatten(0, 1).index_copy_(0, slots, part)

    def _read(self, row: Tensor, table: Ints) -> None:
        """Fill a row's places [2L, K, tokens, D] from its blocks."""
        blocks = torch.from_numpy(table)
        for index, layer in enumerate(self._pool.layers):
            stored = layer[blocks].flatten(0, 1)[: row.shape[2]]  # [tokens, 2, K, D]
            row[2 * index : 2 * index + 2] = stored.permute(1, 2, 0, 3)


def empty_buffer(shape: PastShape, rows: int, longest: int) -> Tensor:
    """Zeros for `longest` tokens of each row, or a few more."""
    places = -(-longest // GRANULE) * GRANULE
    return torch.zeros(2 * shape.layers, rows, shape.kv_heads, places, shape.head_dim, dtype=shape.dtype)
