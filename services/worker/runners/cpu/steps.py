"""The tensors of a step on the CPU: what a model's layers share of its ragged rows. Knows counts, no slots."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.cpu.ops import ReferenceOps

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBuilder:
    """Builds the steps of one model."""

    model: Decoder
    ops: ReferenceOps
    block_size: int

    def build(self, token_ids: Ints, lengths: Ints, contexts: Ints, tables: Ints, samples: Ints) -> StepTensors:
        """T tokens of R rows. lengths, contexts [R]: tokens of each row, and of its sequence up to its end; tables
        [R, blocks]; samples [R]: how many of the row's last tokens are sampled from."""
        ends, size, model = np.cumsum(lengths), self.block_size, self.model
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(row_of)) + (contexts - ends)[row_of]
        tables = tables[:, : -(-int(contexts.max()) // size)]
        blocks = tables[row_of, positions // size]
        slot_mapping = blocks * size + positions % size
        at, plan, dtype = torch.from_numpy(positions), self.ops.plan_attention, model.embedding.dtype
        chosen = np.flatnonzero(samples)
        counts = samples[chosen]
        last = np.repeat(ends[chosen] - np.cumsum(counts), counts) + np.arange(counts.sum())
        return StepTensors(
            token_ids=torch.from_numpy(token_ids),
            positions=at,
            ropes=model.ropes(lambda cos, sin: RopeTables(cos[at], sin[at])),
            slot_mapping=torch.from_numpy(slot_mapping),
            plans={w: plan(lengths, contexts, tables, size, w, dtype) for w in set(model.config.windows)},
            sampled=None if len(last) == len(positions) else torch.from_numpy(last),
        )
