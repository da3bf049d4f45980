"""Keys and values of slots, for runtimes that want them dense: rows that are computed together lie in one buffer.

Knows slots and lengths, no runtime. Legend: R rows of a group, C places of each, L layers, K key/value heads, D head
dimension. A row's tokens are at places 0, 1, ...; the places behind them are zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRANULE = 64
"""Places by which buffers grow: a step reads all of them, so one copy in `GRANULE` steps costs 3% of the reading."""


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

    def append(self, starts: Tensor, new: Sequence[Tensor]) -> None:
        """Store the keys and values [R, K, S, D] of each layer's S new tokens of each row, from places `starts` [R] on.
        The buffer has these places."""
        tokens = new[0].shape[2]
        places = starts[:, None] + torch.arange(tokens)
        rows = torch.arange(len(self.slots))[:, None]
        stacked = torch.stack(list(new)).transpose(2, 3)  # [2L, R, S, K, D]
        self.buffer.transpose(2, 3)[:, rows, places] = stacked


class PastStore:
    """The keys and values of all slots."""

    def __init__(self, shape: PastShape) -> None:
        self.shape = shape
        self._places: dict[int, tuple[PastGroup, int]] = {}
        """For each slot with stored tokens: its group, and its row there."""

    def release(self, slot: int) -> None:
        """Forget what is stored of a slot."""
        self._places.pop(slot, None)

    def gather(self, slots: Sequence[int], computed: Sequence[int], longest: int) -> PastGroup:
        """The group of exactly these slots, in this order, with room for `longest` tokens of each; its rows are copied
        together unless they lie together already. computed [R]: tokens that are stored of each slot."""
        wanted = tuple(slots)
        held = self.held(wanted)
        if held is not None and held.places >= longest:
            return held
        shape, places = self.shape, -(-longest // GRANULE) * GRANULE
        buffer = torch.zeros(2 * shape.layers, len(wanted), shape.kv_heads, places, shape.head_dim, dtype=shape.dtype)
        for row, (slot, tokens) in enumerate(zip(wanted, computed, strict=True)):
            if tokens:
                group, place = self._places[slot]
                buffer[:, row, :, :tokens] = group.buffer[:, place, :, :tokens]
        made = PastGroup(wanted, buffer)
        self._places.update({slot: (made, row) for row, slot in enumerate(wanted)})
        return made

    def held(self, slots: tuple[int, ...]) -> PastGroup | None:
        """The group of exactly these slots, in this order, if they lie together."""
        first, _ = self._places.get(slots[0], (None, 0))
        if first is None or first.slots != slots:
            return None
        together = all(slot in self._places and self._places[slot][0] is first for slot in slots)
        return first if together else None
