"""Which tokens of a step a program of the adapter kernels computes. Knows slots of adapters, no tensor of a device.

The host sorts the tokens of a step by the slot of their adapter and cuts each slot's tokens into tiles, so the kernels
need no count from the device. T tokens, W tiles.

    order    T places of tokens, those with an adapter first, slot by slot
    tiles    W times: slot, first place in `order`, tokens; tiles that are not used have no tokens

The second list begins at a multiple of four words, so that its pointer has one alignment and one kernel serves.
"""

import numpy as np
import numpy.typing as npt

TILE = 16
"""Most tokens of a tile. The same for any number of tokens, so that a row's bits do not depend on it."""


def most_tiles(tokens: int, slots: int) -> int:
    """W: most tiles that `tokens` tokens of `slots` adapters take."""
    return -(-tokens // TILE) + min(tokens, slots)


def tiles_at(tokens: int) -> int:
    """Where `tiles` begins behind `order`."""
    return -(-tokens // 4) * 4


def words_of(tokens: int, slots: int) -> int:
    """int32 words of `order` and `tiles`."""
    return tiles_at(tokens) + 3 * most_tiles(tokens, slots)


def lay_out(slots_T: npt.NDArray[np.integer], tokens: int, slots: int) -> npt.NDArray[np.int32]:
    """The words of a step that is padded to `tokens`. slots_T: the slot of each token's adapter, from 1; 0: none."""
    words = np.zeros(words_of(tokens, slots), np.int32)
    order = np.argsort(slots_T, kind="stable")
    order = order[np.count_nonzero(slots_T == 0) :]
    words[: len(order)] = order
    tiles, place = words[tiles_at(tokens) :].reshape(-1, 3), 0
    owners, counts = np.unique(slots_T[order], return_counts=True)
    first = 0
    for slot, count in zip(owners.tolist(), counts.tolist(), strict=True):
        for begin in range(0, count, TILE):
            tiles[place] = slot, first + begin, min(TILE, count - begin)
            place += 1
        first += count
    return words
