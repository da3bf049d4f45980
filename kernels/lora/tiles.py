"""Which tokens of a step a program of the adapter kernels computes. Knows slots of adapters, no tensor of a device.

The host sorts the tokens of a step by the slot of their adapter and cuts each slot's tokens into tiles, so the kernels
need no count from the device. T tokens, W tiles, A adapters at most, M kinds of modules: an adapter that changes one
kind need not be read where another is computed.

    order     T places of tokens, those with an adapter first, slot by slot
    tiles     W times: slot, first place in `order`, tokens; tiles that are not used have no tokens
    chosen    M times: how many of the step's adapters change this kind of module; then their slots, A at most
    owners    M times T words: which of those adapters is a token's; -1: none. Of steps of FEW tokens at most

Each list begins at a multiple of four words, so that its pointer has one alignment and one kernel serves.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TILE = 16
"""Most tokens of a tile. The same for any number of tokens, so that a row's bits do not depend on it."""

FEW = 64
"""Most tokens of a step whose products and adapters one kernel may compute (`kernels.lora.fused`)."""


def most_tiles(tokens: int, slots: int) -> int:
    """W: most tiles that `tokens` tokens of `slots` adapters take."""
    return -(-tokens // TILE) + min(tokens, slots)


class Places(NamedTuple):
    """Where the lists of a step begin, and the words of all."""

    tiles: int
    chosen: int
    owners: int
    end: int


def places_of(tokens: int, slots: int, kinds: int) -> Places:
    """The places of a step of `tokens` tokens; `order` is at 0. kinds: of modules."""
    tiles = _aligned(tokens)
    chosen = tiles + _aligned(3 * most_tiles(tokens, slots))
    owners = chosen + kinds * _aligned(1 + min(tokens, slots))
    return Places(tiles, chosen, owners, owners + (kinds * _aligned(tokens) if tokens <= FEW else 0))


def most_words(tokens: int, slots: int, kinds: int) -> int:
    """The most words of a step of up to this many tokens: a longer one may have fewer, since owners are left out."""
    return max(places_of(each, slots, kinds).end for each in (tokens, min(tokens, FEW)))


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


def lay_out(slots_T: npt.NDArray[np.integer], tokens: int, changes_MS: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The words of a step that is padded to `tokens`. slots_T: the slot of each token's adapter, from 1; 0: none.
    changes_MS: whether the adapter in a slot, of 0 to S - 1, changes a kind of module."""
    kinds, slots = changes_MS.shape[0], changes_MS.shape[1] - 1
    places = places_of(tokens, slots, kinds)
    words = np.zeros(places.end, np.int32)
    order = np.argsort(slots_T, kind="stable")
    order = order[np.count_nonzero(slots_T == 0) :]
    words[: len(order)] = order
    tiles, place = words[places.tiles : places.tiles + 3 * most_tiles(tokens, slots)].reshape(-1, 3), 0
    found, counts = np.unique(slots_T[order], return_counts=True)
    first = 0
    for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
        for begin in range(0, count, TILE):
            tiles[place] = slot, first + begin, min(TILE, count - begin)
            place += 1
        first += count
    if tokens <= FEW:
        chosen_MA = words[places.chosen : places.owners].reshape(kinds, -1)
        owners_MT = words[places.owners :].reshape(kinds, -1)
        for chosen_A, owners_T, changes_S in zip(chosen_MA, owners_MT, changes_MS, strict=True):
            changing = found[changes_S[found]]
            chosen_A[0], chosen_A[1 : 1 + len(changing)] = len(changing), changing
            which_S = np.full(slots + 1, -1)
            which_S[changing] = range(len(changing))
            owners_T[:] = -1
            owners_T[: len(slots_T)] = which_S[slots_T]
    return words
