"""Packed steps as stages of a pipeline read them. Knows the format, never who computes them."""

import numpy as np
import numpy.typing as npt

from services.worker.runners.step import HEADER_WORDS, LAST_TOKEN, ROW_WORDS, Edit, Words, unpack

_STRUCTURAL = (Edit.RELEASE, Edit.ADMIT, Edit.BLOCKS, Edit.ADAPTER)


def without_draws(words: Words) -> Words:
    """The step for a stage that samples from no token."""
    edits, rows = unpack(words)
    kept: list[int] = []
    for edit, slot, data in edits:
        if edit in _STRUCTURAL:
            kept += (edit, slot, len(data), *data.tolist())
    tail = words[HEADER_WORDS + int(words[0]) :].copy()
    tail[2 : len(rows.slots) * ROW_WORDS : ROW_WORDS] = 0
    return np.concatenate([np.array([len(kept), *words[1:HEADER_WORDS], *kept], np.int32), tail])


def with_tokens(words: Words, last_tokens: npt.NDArray[np.int64]) -> Words:
    """The step with each slot's last token in place of LAST_TOKEN. last_tokens: by slot."""
    _, rows = unpack(words)
    asked = rows.ids == LAST_TOKEN
    if not asked.any():
        return words
    slots = np.repeat(np.array(rows.slots), rows.lengths)[asked]
    words = words.copy()
    words[len(words) - len(rows.ids) :][asked] = last_tokens[slots]
    return words
