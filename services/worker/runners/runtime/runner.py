"""Executes packed steps on a decoder that another runtime computes. Knows slots, never jobs, and not which runtime.

Legend: R rows of a step, S tokens of each row of a call, P places of past, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.layers import finite_rows
from kernels.reference.sampling import mask_logits
from services.worker.models.config import ModelConfig
from services.worker.runners.base import NO_SCORES, NOTHING_SAMPLED, Masks, Sampled, Scores, StepResult
from services.worker.runners.cpu.kv_pool import CpuPool
from services.worker.runners.cpu.sampler import Sampler
from services.worker.runners.cpu.scores import score_logits
from services.worker.runners.runtime.calls import divide
from services.worker.runners.runtime.past import PastGroup, PastShape, PastStore, empty_buffer
from services.worker.runners.runtime.session import Call, DecoderSession
from services.worker.runners.scored_rows import ScoredRows
from services.worker.runners.step import LAST_TOKEN, Edit, Rows, SlotState, Words, unpack

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class RuntimeStep:
    """A launched step of R rows."""

    slots: Ints
    """[R]."""
    contexts: Ints
    """[R]: tokens of the sequence so far, those of this step included."""
    chosen: npt.NDArray[np.intp]
    """The rows that sample."""
    finite: list[bool]
    """[R]."""
    logits: Tensor
    """float32 [rows that sample, V]."""
    scores: Mapping[int, Scores]
    sampled: Sampled | None = None
    """None: the tokens are drawn when the masks arrive."""


class RuntimeRunner:
    """A `Runner` over a `DecoderSession`. Tokens are drawn by the sampler of the CPU's runner, with the same noise.

    Keys and values are in blocks, and once more in the buffers that the runtime reads. It takes no guesses.
    """

    depth = 1
    """A step is over when it has been launched and its tokens are drawn."""

    def __init__(
        self,
        session: DecoderSession,
        shape: PastShape,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        slots: int,
        max_length: int,
        padding_tokens: int,
    ) -> None:
        """slots: most sequences in the batch; max_length: most tokens of each. padding_tokens: as in `calls.divide`."""
        self.session, self.padding_tokens = session, padding_tokens
        self.kv = CpuPool(config, blocks, block_size, shape.dtype)
        self.sampler = Sampler(slots, config.vocab_size)
        self.past = PastStore(shape, self.kv, block_size)
        self._tables = np.zeros((slots, -(-max_length // block_size)), np.int64)
        self._scores: dict[int, list[int]] = {}
        """The data of SCORE of this step, by slot."""
        self._computed = np.zeros(slots, np.int64)
        self._last_token = np.zeros(slots, np.int64)
        self._masked = np.zeros(slots, np.bool_)

    def launch(self, words: Words) -> RuntimeStep:
        """Apply the edits and compute the rows; draw at once, unless some rows wait for masks. After an exception no
        row has advanced, and the edits are applied."""
        edits, rows = unpack(words)
        assert max(rows.samples, default=0) <= 1, "guesses are for runners of the model itself"
        self._scores.clear()
        for edit, slot, data in edits:
            self._apply(edit, slot, data)
        with torch.inference_mode():
            step = self._compute(rows)
            if not self._masked[step.slots[step.chosen]].any():
                self._finish(step)
        return step

    def draw(self, step: RuntimeStep, masks: Masks) -> None:
        """Draw all tokens of a step that has rows with masks."""
        lines = np.flatnonzero(self._masked[step.slots[step.chosen]])
        with torch.inference_mode():
            mask_logits(step.logits, torch.from_numpy(lines), torch.from_numpy(masks))
            self._finish(step)

    def done(self, step: RuntimeStep) -> bool:
        """Always: a step is computed when it is launched."""
        return True

    def collect(self, step: RuntimeStep) -> StepResult:
        """The results of a launched step."""
        assert step.sampled is not None, "the step's rows with masks were not drawn"
        return StepResult(step.finite, step.sampled, step.scores)

    def run(self, words: Words) -> StepResult:
        """Launch a step and collect it."""
        return self.collect(self.launch(words))

    def inspect(self, token_ids: Sequence[int]) -> "RuntimeInspection":
        """Open up the model for one sequence."""
        return RuntimeInspection(self.session, self.past.shape, token_ids)

    def _apply(self, edit: Edit, slot: int, words: Words) -> None:
        if edit is Edit.ADMIT:
            state = SlotState.read(words)
            self._empty(slot, state.computed)
            self._masked[slot] = False
            self.sampler.admit(slot, state)
        elif edit is Edit.RELEASE:
            self._empty(slot)
        elif edit is Edit.MASK:
            self._masked[slot] = True
        elif edit is Edit.SCORE:
            self._scores[slot] = words.tolist()
        elif edit is Edit.BLOCKS:
            first = int(words[0])
            self._tables[slot, first : first + len(words) - 1] = words[1:]
        else:
            self.sampler.edit(edit, slot, words)

    def _empty(self, slot: int, computed: int = 0) -> None:
        self._computed[slot] = computed
        self.past.release(slot)

    def _compute(self, rows: Rows) -> RuntimeStep:
        """Compute all rows. Their new keys and values are stored when all calls have succeeded."""
        slots = np.array(rows.slots, np.int64)
        contexts = self._computed[slots] + np.array(rows.lengths, np.int64)
        scored = ScoredRows.of(self._scores, rows)
        asked = dict(zip(scored.rows, scored.counts, strict=True))
        ids = self._token_ids(rows, slots)
        logits = [torch.empty(0)] * len(slots)
        stored: list[tuple[PastGroup, Ints, Tensor]] = []
        calls = divide(rows.lengths, contexts.tolist(), self.padding_tokens)
        for members in calls:
            starts = self._computed[slots[members]]
            tables, longest = self._tables[slots[members]], int(contexts[members].max())
            group = self.past.gather(slots[members].tolist(), tables, starts.tolist(), longest)
            counts = [asked.get(row, 0) for row in members]
            call = make_call(group, np.stack([ids[row] for row in members]), starts, counts)
            computed = self.session.compute(call)
            if len(calls) > 1:
                computed = computed.copied()
            stored.append((group, starts, computed.stacked()))
            parts = computed.logits.split([count + 1 for count in counts])  # type: ignore[no-untyped-call]
            for row, part in zip(members, parts, strict=True):
                logits[row] = part
        for group, starts, new in stored:
            group.append(torch.from_numpy(starts), new)
            self.past.store(self._tables[list(group.slots)], starts, new)
        last = logits[0][-1:] if len(logits) == 1 else torch.stack([part[-1] for part in logits])
        chosen = np.flatnonzero(rows.samples)
        return RuntimeStep(
            slots,
            contexts,
            chosen,
            finite_rows(last, [1] * len(slots)),
            last if len(chosen) == len(slots) else last[torch.from_numpy(chosen)],
            score_logits(scored, (logits[row][:-1] for row in scored.rows)) if asked else NO_SCORES,
        )

    def _token_ids(self, rows: Rows, slots: Ints) -> list[Ints]:
        """The tokens of each row, with those that the runner has itself."""
        ids = rows.ids.astype(np.int64)
        own = ids == LAST_TOKEN
        ids[own] = self._last_token[np.repeat(slots, rows.lengths)[own]]
        return np.split(ids, np.cumsum(rows.lengths)[:-1])

    def _finish(self, step: RuntimeStep) -> None:
        """Draw, and advance the slots."""
        step.sampled, sampling = NOTHING_SAMPLED, step.slots[step.chosen]
        if len(sampling):
            step.sampled = self.sampler.sample(step.logits, sampling, step.contexts[step.chosen])
        self._computed[step.slots] = step.contexts
        self._last_token[sampling] = [drawn[-1] for drawn in step.sampled.tokens]


def make_call(group: PastGroup, ids: Ints, computed: Ints, asked: Sequence[int]) -> Call:
    """The call for the rows of a group. ids [R, S]; computed [R]: stored tokens; asked [R]: of each row's first tokens,
    how many logits are wanted beside the last token's."""
    rows, tokens = ids.shape
    buffer = group.buffer
    if tokens > 1:  # One row alone: no padding is computed, and the copy is small beside the products.
        buffer = buffer[:, :, :, : int(computed[0])].contiguous()
    places, steps = np.arange(buffer.shape[3]), np.arange(tokens)
    mask = np.ones((rows, len(places) + tokens), np.int64)
    mask[:, : len(places)] = places < computed[:, None]
    wanted = [row * tokens + place for row, count in enumerate(asked) for place in (*range(count), tokens - 1)]
    return Call(
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        torch.from_numpy(computed[:, None] + steps),
        torch.tensor(wanted, dtype=torch.int64),
        buffer.unbind(0),
    )


@dataclass(frozen=True, slots=True)
class RuntimeInspection:
    """An `Inspection` of a runtime's decoder."""

    session: DecoderSession
    shape: PastShape
    token_ids: Sequence[int]

    def logits(self) -> npt.NDArray[np.float32]:
        """The logits [T, V] at each of the sequence's tokens."""
        ids = np.array([self.token_ids], np.int64)
        empty = PastGroup((0,), empty_buffer(self.shape, 1, 1))
        with torch.inference_mode():
            call = make_call(empty, ids, np.zeros(1, np.int64), [len(self.token_ids) - 1])
            found: npt.NDArray[np.float32] = self.session.compute(call).logits.numpy()
        return found
