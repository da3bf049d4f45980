"""Executes packed steps on the CPU: slots, forward, sampling. Knows slots and blocks, never jobs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.reference import finite_rows
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.base import NOTHING_SAMPLED, StepResult
from services.worker.runners.cpu.kv_pool import CpuPool
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.sampler import Sampler
from services.worker.runners.inspection import DecoderInspection, first_blocks
from services.worker.runners.step import Edit, Rows, SlotState, Words, unpack


class CpuRunner:
    """A `Runner` in plain torch. It reads the packed steps that a GPU's runner reads, and owns all tensors."""

    depth = 1
    """A step is over when it has been launched."""

    def __init__(
        self,
        model: Decoder,
        ops: ReferenceOps,
        blocks: int,
        block_size: int,
        slots: int,
        max_length: int,
        stored: torch.dtype,
    ) -> None:
        config = model.config
        self.ops = ops
        self.model, self.block_size = model, block_size
        self.kv = CpuPool(config, blocks, block_size, stored)
        self.sampler = Sampler(slots, config.vocab_size)
        self._windows = set(config.windows)
        self._tables = np.zeros((slots, -(-max_length // block_size)), np.int64)
        self._computed = np.zeros(slots, np.int64)
        self._last_token = np.zeros(slots, np.int64)

    def launch(self, words: Words) -> StepResult:
        """Compute the step at once."""
        return self.run(words)

    def done(self, step: StepResult) -> bool:
        """Always: a step is computed when it is launched."""
        return True

    def collect(self, step: StepResult) -> StepResult:
        """The results of a launched step."""
        return step

    def run(self, words: Words) -> StepResult:
        """Apply the edits and compute the rows. After an exception no row has advanced, and the edits are applied."""
        edits, rows = unpack(words)
        for edit, slot, data in edits:
            self._apply(edit, slot, data)
        slots, lengths = np.array(rows.slots, np.int64), np.array(rows.lengths, np.int64)
        contexts = self._computed[slots] + lengths
        with torch.inference_mode():
            step = self._prepare(rows, slots, lengths, contexts)
            x, seen = self.model.forward(step, self.kv.layers)
            finite = finite_rows(seen, rows.lengths)
            chosen = np.flatnonzero(rows.samples)
            sampled = NOTHING_SAMPLED
            if len(chosen):
                logits = self.model.logits(x).float()
                for row, good in zip(chosen.tolist(), finite_rows(logits, [1] * len(chosen)), strict=True):
                    finite[row] &= good
                sampled = self.sampler.sample(logits, slots[chosen], contexts[chosen])
        self._computed[slots] = contexts
        self._last_token[slots[chosen]] = [token for (token,) in sampled.tokens]
        return StepResult(finite, sampled)

    def inspect(self, token_ids: Sequence[int]) -> DecoderInspection:
        """Open up the model for one sequence, in the first blocks of the pool."""
        count, size, model = len(token_ids), self.block_size, self.model
        blocks, slot_mapping = first_blocks(count, size)
        lengths, table, plan = np.array([count]), blocks[None].numpy(), self.ops.plan_attention
        step = StepTensors(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.arange(count),
            rope=RopeTables(model.cos[:count], model.sin[:count]),
            slot_mapping=slot_mapping,
            plans={w: plan(lengths, lengths, table, size, w, model.embedding.dtype) for w in self._windows},
            sampled=None,
        )
        return DecoderInspection(model, step, self.kv.layers)

    def _apply(self, edit: Edit, slot: int, words: Words) -> None:
        if edit is Edit.BLOCKS:
            first = int(words[0])
            self._tables[slot, first : first + len(words) - 1] = words[1:]
        elif edit is Edit.ADMIT:
            state = SlotState.read(words)
            self._computed[slot] = state.computed
            self.sampler.admit(slot, state)
        elif edit is Edit.HISTORY:
            self.sampler.remember(slot, int(words[0]), words[1:])
        elif edit is Edit.BIAS:
            ids, values = np.split(words, 2)
            self.sampler.bias(slot, ids, values.view(np.float32))
        elif edit is Edit.BAN:
            self.sampler.ban(slot, int(words[0]), words[1:])
        else:
            self._computed[slot] = 0

    def _prepare(
        self,
        rows: Rows,
        slots: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
    ) -> StepTensors:
        """What the layers share, for T tokens of R rows."""
        ends = np.cumsum(lengths)
        row_of = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(len(row_of)) + (contexts - ends)[row_of]
        token_ids = np.where(rows.ids < 0, self._last_token[slots][row_of], rows.ids)
        tables = self._tables[slots, : -(-int(contexts.max()) // self.block_size)]
        blocks = tables[row_of, positions // self.block_size]
        slot_mapping = blocks * self.block_size + positions % self.block_size
        at, model = torch.from_numpy(positions), self.model
        plan, dtype = self.ops.plan_attention, model.embedding.dtype
        last = ends[np.flatnonzero(rows.samples)] - 1
        return StepTensors(
            token_ids=torch.from_numpy(token_ids),
            positions=at,
            rope=RopeTables(model.cos[at], model.sin[at]),
            slot_mapping=torch.from_numpy(slot_mapping),
            plans={w: plan(lengths, contexts, tables, self.block_size, w, dtype) for w in self._windows},
            sampled=None if len(last) == len(positions) else torch.from_numpy(last),
        )
