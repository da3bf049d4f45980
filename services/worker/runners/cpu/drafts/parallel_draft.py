"""A parallel draft model beside the served one, on the CPU: it makes all guesses of a step in one pass.

Behind the last known token of a row come mask tokens, one for each guess but the first (PARD, An et al.,
arXiv:2504.18583). Their keys and values are overwritten by those of the tokens that come in their place.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from services.worker.runners.cpu.drafts.draft_model import CpuDraftModel, Pending
from services.worker.runners.cpu.sampler import Sampler


class CpuParallelDraft(CpuDraftModel):
    """Guesses for rows of a `CpuRunner`. The model's config has a mask token."""

    @torch.inference_mode()
    def guess(
        self, pending: Mapping[int, Pending], wanted: Mapping[int, int], tables: npt.NDArray[np.int64], sampler: Sampler
    ) -> dict[int, list[int]]:
        """As `CpuDraftModel.guess`."""
        mask_token = self.model.config.mask_token
        assert mask_token is not None
        slots = np.array([*pending], np.int64)
        asked = np.array([wanted.get(slot, 0) for slot in pending], np.int64)
        masks = np.maximum(asked - 1, 0)
        ends = np.array([first + len(ids) for first, ids in pending.values()], np.int64)
        rows = [[*ids, *[mask_token] * count] for (_, ids), count in zip(pending.values(), masks.tolist(), strict=True)]
        lengths, ids = np.array([*map(len, rows)], np.int64), np.concatenate(rows).astype(np.int64)
        step = self._steps.build(ids, lengths, ends + masks, tables[slots], asked)
        x, _ = self.model.forward(step, self.kv.layers)
        places = np.concatenate([np.arange(count) for count in asked])
        drawing = np.repeat(np.arange(len(slots)), asked)
        if not len(drawing):
            return {slot: [] for slot in pending}
        drawn = sampler.guess(self.model.logits(x).float(), slots[drawing], ends[drawing] + places).numpy()
        parts = np.split(drawn, np.cumsum(asked)[:-1])
        return {slot: part.tolist() for slot, part in zip(pending, parts, strict=True)}
