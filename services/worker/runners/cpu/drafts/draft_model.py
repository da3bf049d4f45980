"""A small model beside the served one that guesses tokens, on the CPU. Knows slots and blocks, never jobs.

Its keys and values are in a pool of its own, under the same numbers of blocks as those of the served model: a table
serves both. It draws with the sampling settings and the noise of the served model, so that sampled answers are guessed
too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.runners.cpu.kv_pool import CpuPool
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.sampler import Sampler
from services.worker.runners.cpu.steps import Ints, StepBuilder

Pending = tuple[int, Sequence[int]]
"""The position of the first token that a draft lacks, and the tokens from there to the last known one."""


class CpuDraftModel:
    """Guesses for rows of a `CpuRunner`."""

    def __init__(self, model: Decoder, ops: ReferenceOps, blocks: int, block_size: int, stored: torch.dtype) -> None:
        self.model = model
        self.kv = CpuPool(model.config, blocks, block_size, stored)
        self._steps = StepBuilder(model, ops, block_size)

    @torch.inference_mode()
    def guess(
        self, pending: Mapping[int, Pending], wanted: Mapping[int, int], tables: npt.NDArray[np.int64], sampler: Sampler
    ) -> dict[int, list[int]]:
        """Compute the pending tokens of slots, then as many guesses as are wanted of each, one after another.

        tables [slots, blocks]. -> the guesses of each slot that wants any.
        """
        slots = np.array([*pending], np.int64)
        lengths = np.array([len(ids) for _, ids in pending.values()], np.int64)
        contexts = np.array([first + len(ids) for first, ids in pending.values()], np.int64)
        ids = np.concatenate([np.array(ids, np.int64) for _, ids in pending.values()])
        left = np.array([wanted.get(slot, 0) for slot in pending], np.int64)
        features = self._first_features(contexts, lengths, tables[slots])
        guesses: dict[int, list[int]] = {slot: [] for slot in pending}
        while True:
            drawing = np.flatnonzero(left)
            step = self._build(ids, lengths, contexts, tables[slots], drawing, features)
            drawn, x = self._draw(step, slots[drawing], contexts[drawing], sampler)
            for slot, token in zip(slots[drawing].tolist(), drawn.tolist(), strict=True):
                guesses[slot].append(token)
            left[drawing] -= 1
            kept = np.flatnonzero(left[drawing])  # The last guess of a slot is computed by the served model alone.
            if not len(kept):
                return guesses
            slots, contexts, left, ids = (
                slots[drawing][kept],
                contexts[drawing][kept] + 1,
                left[drawing][kept],
                drawn[kept],
            )
            lengths, features = np.ones(len(slots), np.int64), self._next_features(x[kept])

    def _first_features(self, contexts: Ints, lengths: Ints, tables: Ints) -> Tensor | None:
        """What the model reads beside the pending tokens, in the order of the rows: nothing."""

    def _next_features(self, x: Tensor) -> Tensor | None:
        """What it reads beside its own guesses, from the residual stream [S, width] that they were drawn from."""

    def _build(
        self, ids: Ints, lengths: Ints, contexts: Ints, tables: Ints, drawing: Ints, features: Tensor | None
    ) -> StepTensors:
        samples = np.zeros(len(lengths), np.int64)
        samples[drawing] = 1
        step = self._steps.build(ids, lengths, contexts, tables, samples)
        return step if features is None else replace(step, features=features)

    def _draw(self, step: StepTensors, slots: Ints, contexts: Ints, sampler: Sampler) -> tuple[Ints, Tensor]:
        """-> a guess for each of S slots, and the residual stream [S, width] behind it."""
        x, _ = self.model.forward(step, self.kv.layers)
        if not len(slots):
            return np.zeros(0, np.int64), x
        return sampler.guess(self.model.logits(x).float(), slots, contexts).numpy(), x
