"""Which tokens of a step a program of the adapter kernels computes. Knows slots of adapters, no tensor of a device.

The host sorts the tokens of a step by the slot of their adapter and cuts each slot's tokens into tiles, so the kernels
need no count from the device. T tokens, W tiles, A adapters at most.

    order     T places of tokens, those with an adapter first, slot by slot
    tiles     W times: slot, first place in `order`, tokens; tiles that are not used have no tokens
    chosen    how many adapters the step has; then their slots, A at most
    owners    T times: which of those adapters is a token's; -1: none

Each list begins at a multiple of four words, so that its pointer has one alignment and one kernel serves.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TILE = 16
"""Most tokens of a tile. The same for any number of tokens, so that a row's bits do not depend on it."""


def most_tiles(tokens: int, slots: int) -> int:
    """W: most tiles that `tokens` tokens of `slots` adapters take."""
    return -(-tokens // TILE) + min(tokens, slots)


class Places(NamedTuple):
    """Where the lists of a step begin, and the words of all."""

    tiles: int
    chosen: int
    owners: int
    end: int


def places_of(tokens: int, slots: int) -> Places:
    """The places of a step of `tokens` tokens; `order` is at 0."""
    tiles = _aligned(tokens)
    chosen = tiles + _aligned(3 * most_tiles(tokens, slots))
    owners = chosen + _aligned(1 + min(tokens, slots))
    return Places(tiles, chosen, owners, owners + tokens)


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


def lay_out(slots_T: npt.NDArray[np.integer], tokens: int, slots: int) -> npt.NDArray[np.int32]:
    """The words of a step that is padded to `tokens`. slots_T: the slot of each token's adapter, from 1; 0: none."""
    places = places_of(tokens, slots)
    words = np.zeros(places.end, np.int32)
    order = np.argsort(slots_T, kind="stable")
    order = order[np.count_nonzero(slots_T == 0) :]
    words[: len(order)] = order
    tiles, place = words[places.tiles : places.tiles + 3 * most_tiles(tokens, slots)].reshape(-1, 3), 0
    found, which, counts = np.unique(slots_T[order], return_inverse=True, return_counts=True)
    first = 0
    for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
        for begin in range(0, count, TILE):
            tiles[place] = slot, first + begin, min(TILE, count - begin)
            place += 1
        first += count
    words[places.chosen] = len(found)
    words[places.chosen + 1 :][: len(found)] = found
    owners = words[places.owners :]
    owners[:] = -1
    owners[order] = which
    return words
