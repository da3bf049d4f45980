"""Lays out a batch of an encoder: its texts one behind another, without padding. Knows numbers, no device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.runners.base import TextTokens

Ids = npt.NDArray[np.int32]


class PackedIds(NamedTuple):
    """T tokens of B texts."""

    token_ids: Ids
    """[T]."""
    positions: Ids
    """[T]: rows of the table of positions."""
    segments: Ids | None
    """[T]: 0, or 1 in the second part of a pair; None: all 0."""
    starts: Ids
    """[B + 1]: where each text begins, and T."""


def pack(texts: Sequence[TextTokens], first_position: int) -> PackedIds:
    """The texts in their order. first_position: the row of a text's first token."""
    lengths = np.fromiter((len(text.token_ids) for text in texts), np.int32, len(texts))
    starts = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    token_ids = np.concatenate([np.asarray(text.token_ids, np.int32) for text in texts])
    places = np.arange(len(token_ids), dtype=np.int32) - np.repeat(starts[:-1], lengths)
    segments = None
    if any(text.second for text in texts):
        seconds = [text.second or len(text.token_ids) for text in texts]
        segments = (places >= np.repeat(seconds, lengths)).astype(np.int32)
    return PackedIds(token_ids, places + np.int32(first_position), segments, starts)
