"""Executes packed steps on the CPU: slots, forward, sampling. Knows slots and blocks, never jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import kv_pages
from kernels.reference.layers import finite_rows
from kernels.reference.sampling import mask_logits
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.base import NO_SCORES, NOTHING_SAMPLED, Masks, Sampled, Scores, StepResult
from services.worker.runners.cpu.adapters import CpuAdapters
from services.worker.runners.cpu.drafts.draft_model import CpuDraftModel, Pending
from services.worker.runners.cpu.drafts.heads import CpuHeads
from services.worker.runners.cpu.guesses import sample_along
from services.worker.runners.cpu.kv_pool import CpuPool
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.sampler import Sampler
from services.worker.runners.cpu.scores import Asked
from services.worker.runners.cpu.steps import Ints, StepBuilder
from services.worker.runners.inspection import DecoderInspection, first_blocks
from services.worker.runners.step import LAST_TOKEN, OWN_GUESS, Edit, Rows, SlotState, Words, unpack


@dataclass(slots=True)
class CpuStep:
    """A launched step of R rows."""

    rows: Rows
    slots: npt.NDArray[np.int64]
    """[R]."""
    contexts: npt.NDArray[np.int64]
    """[R]: tokens of the sequence so far, those of this step included."""
    chosen: npt.NDArray[np.intp]
    """The rows that sample."""
    inputs: StepTensors
    finite: list[bool]
    """[R]."""
    logits: Tensor | None = None
    """float32, a line for each token after which one is drawn."""
    sampled: Sampled | None = None
    """None: the tokens are drawn when the masks arrive."""
    scores: Mapping[int, Scores] = field(default_factory=lambda: NO_SCORES)

    @property
    def undrawn(self) -> bool:
        """Whether its tokens are drawn when masks arrive."""
        return self.sampled is None

    @property
    def has_guesses(self) -> bool:
        """Whether it is to be collected before the next one is launched."""
        return max(self.rows.samples, default=0) > 1


class CpuRunner:
    """A `Runner` in plain torch. It reads the packed steps that a GPU's runner reads, and owns all tensors."""

    depth = 1
    """A step is over when it has been launched and its tokens are drawn."""

    def __init__(
        self,
        model: Decoder,
        ops: ReferenceOps,
        blocks: int,
        block_size: int,
        slots: int,
        max_length: int,
        stored: torch.dtype,
        draft: CpuDraftModel | None = None,
        adapters: CpuAdapters | None = None,
    ) -> None:
        """draft: guesses tokens where a row has OWN_GUESS. adapters: of the model; None: it serves none."""
        config = model.config
        self.ops = ops
        self.model, self.block_size = model, block_size
        self.kv = CpuPool(config, blocks, block_size, stored)
        model.between_layers = self.kv.computed
        self.sampler = Sampler(slots, config.vocab_size)
        self._steps, self.draft = StepBuilder(model, ops, block_size), draft
        if isinstance(draft, CpuHeads):
            model.hidden = self.kv.hidden = draft.hidden
        self._scores: dict[int, list[int]] = {}
        """The data of SCORE of this step, by slot."""
        self._pending: dict[int, Pending] = {}
        """What the draft model is to compute in this step, by slot."""
        self._tables = np.zeros((slots, -(-max_length // block_size)), np.int64)
        self._computed = np.zeros(slots, np.int64)
        self._last_token = np.zeros(slots, np.int64)
        self._masked = np.zeros(slots, np.bool_)
        self.adapters = adapters
        self._adapter_slots = np.zeros(slots, np.int64)

    def launch(self, words: Words) -> CpuStep:
        """Apply the edits and compute the rows; draw at once, unless some rows wait for masks. After an exception no
        row has advanced, and the edits are applied."""
        edits, rows = unpack(words)
        self._pending.clear()
        self._scores.clear()
        for edit, slot, data in edits:
            self._apply(edit, slot, data)
        slots, lengths = np.array(rows.slots, np.int64), np.array(rows.lengths, np.int64)
        contexts, chosen = self._computed[slots] + lengths, np.flatnonzero(rows.samples)
        with torch.inference_mode():
            ids = self._token_ids(rows, slots)
            inputs = self._steps.build(ids, lengths, contexts, self._tables[slots], np.array(rows.samples))
            if self.adapters is not None and self._adapter_slots[slots].any():
                of_tokens = np.repeat(self._adapter_slots[slots], lengths)
                inputs = replace(inputs, adapters=self.adapters.of_tokens(of_tokens))
            asked = Asked.of(self._scores, rows) if self._scores else None
            x, seen = self.model.forward(asked.widen(inputs) if asked else inputs, self.kv.layers)
            step = CpuStep(rows, slots, contexts, chosen, inputs, finite_rows(seen, rows.lengths))
            if asked:
                step.scores = asked.score(self.model, x)
                x = x[: len(x) - asked.count]
            if len(chosen):
                step.logits, counts = self.model.logits(x).float(), [rows.samples[row] for row in chosen]
                for row, good in zip(chosen.tolist(), finite_rows(step.logits, counts), strict=True):
                    step.finite[row] &= good
            if not self._masked[slots[chosen]].any():
                self._finish(step)
        return step

    def draw(self, step: CpuStep, masks: Masks) -> None:
        """Draw all tokens of a step that has rows with masks."""
        assert step.logits is not None, "the step has no rows with masks"
        with torch.inference_mode():
            counts = np.array([step.rows.samples[row] for row in step.chosen])
            lines = np.flatnonzero(np.repeat(self._masked[step.slots[step.chosen]], counts))
            mask_logits(step.logits, torch.from_numpy(lines), torch.from_numpy(masks))
            self._finish(step)

    def done(self, step: CpuStep) -> bool:
        """Always: a step is computed when it is launched."""
        return True

    def collect(self, step: CpuStep) -> StepResult:
        """The results of a launched step."""
        assert step.sampled is not None, "the step's rows with masks were not drawn"
        return StepResult(step.finite, step.sampled, step.scores)

    def run(self, words: Words) -> StepResult:
        """Launch a step and collect it."""
        return self.collect(self.launch(words))

    def _finish(self, step: CpuStep) -> None:
        """Draw, and advance the slots."""
        sampled, rows, slots = NOTHING_SAMPLED, step.rows, step.slots
        if step.logits is not None:
            sampled = self._sample(step.logits, rows, step.chosen, slots, step.contexts, step.finite, step.inputs)
        self._computed[slots] = step.contexts
        for row, drawn in zip(step.chosen.tolist(), sampled.tokens, strict=True):
            self._computed[slots[row]] += len(drawn) - rows.samples[row]
            if drawn:
                self._last_token[slots[row]] = drawn[-1]
        step.sampled = sampled

    def _sample(
        self,
        logits: Tensor,
        rows: Rows,
        chosen: npt.NDArray[np.intp],
        slots: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
        finite: list[bool],
        step: StepTensors,
    ) -> Sampled:
        """Draw for the chosen rows. A row of guesses that is not finite draws nothing."""
        counts = [rows.samples[row] for row in chosen]
        if max(counts) == 1:
            return self.sampler.sample(logits, slots[chosen], contexts[chosen])
        ends, guesses = np.cumsum(rows.lengths), []
        ids = step.token_ids.tolist()
        for row, count in zip(chosen.tolist(), counts, strict=True):
            end = int(ends[row])
            guesses.append(ids[end - count + 1 : end])
            if count > 1 and not finite[row]:
                self._clear(step.slot_mapping[end - count : end])
        drawing = np.array([count == 1 or finite[row] for row, count in zip(chosen.tolist(), counts, strict=True)])
        sampled = sample_along(self.sampler, logits, slots[chosen], contexts[chosen], guesses, drawing)
        for row, draws in zip(chosen.tolist(), drawing.tolist(), strict=True):
            finite[row] |= not draws
        return sampled

    def _clear(self, slot_mapping: Tensor) -> None:
        """Zero keys and values at these places of the pool."""
        for layer in self.kv.layers:
            zeros = self.model.embedding.new_zeros(len(slot_mapping), 2 * layer.shape[3], layer.shape[4])
            kv_pages.store(layer, slot_mapping, zeros, None)

    def inspect(self, token_ids: Sequence[int]) -> DecoderInspection:
        """Open up the model for one sequence, in the first blocks of the pool."""
        count, size, model = len(token_ids), self.block_size, self.model
        blocks, slot_mapping = first_blocks(count, size)
        lengths, table, plan = np.array([count]), blocks[None].numpy(), self.ops.plan_attention
        step = StepTensors(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.arange(count),
            ropes=model.ropes(lambda cos, sin: RopeTables(cos[:count], sin[:count])),
            slot_mapping=slot_mapping,
            plans={w: plan(lengths, lengths, table, size, w, model.embedding.dtype) for w in set(model.config.windows)},
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
            self._masked[slot] = False
            self._adapter_slots[slot] = 0
            self.sampler.admit(slot, state)
        elif edit is Edit.DRAFT:
            self._pending[slot] = int(words[0]), words[1:].tolist()
        elif edit is Edit.MASK:
            self._masked[slot] = True
        elif edit is Edit.SCORE:
            self._scores[slot] = words.tolist()
        elif edit is Edit.ADAPTER:
            self._adapter_slots[slot] = words[0]
        elif edit is Edit.RELEASE:
            self._computed[slot] = 0
        else:
            self.sampler.edit(edit, slot, words)

    def _token_ids(self, rows: Rows, slots: Ints) -> Ints:
        """The tokens of the rows, with those that the runner has itself. The draft model's guesses are made here."""
        ids = rows.ids.astype(np.int64)
        ids[ids == LAST_TOKEN] = self._last_token[
            slots[np.repeat(np.arange(len(slots)), rows.lengths)[ids == LAST_TOKEN]]
        ]
        if self.draft is None or not self._pending:
            return ids
        own, lengths = ids == OWN_GUESS, np.array(rows.lengths, np.int64)
        wanted = np.add.reduceat(own.astype(np.int64), np.cumsum(lengths) - lengths)
        asked = dict(zip(rows.slots, wanted.tolist(), strict=True))
        guesses = self.draft.guess(self._pending, asked, self._tables, self.sampler)
        guessed = torch.tensor([[token for slot in rows.slots for token in guesses.get(slot, ())]])
        ids[own] = self.model.agreed(guessed)[0].numpy()
        return ids
