"""Draws along the guesses of rows: up to the first draw that is not what was guessed. Knows the sampler, no model.

Each place is drawn as plain decoding draws it, with its own noise, and the counts of its penalties include the draws
before it. So the draws that are kept are those of plain decoding.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.runners.base import Sampled, Top
from services.worker.runners.cpu.sampler import Sampler


def sample_along(
    sampler: Sampler,
    logits: Tensor,
    slots: npt.NDArray[np.int64],
    contexts: npt.NDArray[np.int64],
    guesses: list[list[int]],
    drawing: npt.NDArray[np.bool_],
) -> Sampled:
    """logits float32 [L, V]: for each of S rows a line after its last known token and after each of its guesses.
    slots [S]; contexts [S]: tokens up to the last guess; drawing [S]: rows that are not drawing draw nothing.
    """
    counts = np.array([len(each) + 1 for each in guesses])
    first = np.cumsum(counts) - counts
    befores = contexts - counts + 1
    tokens: list[list[int]] = [[] for _ in guesses]
    logprobs: list[list[float]] = [[] for _ in guesses]
    tops: list[list[Top]] = [[] for _ in guesses]
    active = np.flatnonzero(drawing)
    place, asked = 0, False
    while len(active):
        drawn = sampler.sample(logits[first[active] + place], slots[active], befores[active] + place)
        asked |= drawn.logprobs is not None
        for index, row in enumerate(active.tolist()):
            tokens[row] += drawn.tokens[index]
            logprobs[row] += drawn.logprobs[index] if drawn.logprobs else [float("nan")]
            tops[row] += drawn.tops[index] if drawn.tops else [[]]
        right = [place < len(guesses[row]) and tokens[row][place] == guesses[row][place] for row in active.tolist()]
        active = active[np.array(right, np.bool_)]
        place += 1
    return Sampled(tokens, logprobs if asked else None, tops if asked else None)
