"""A small model beside the served one that guesses tokens, on a GPU: all guesses of a step before the host looks again.

Knows slots and blocks, never jobs. Its keys and values are in a pool of its own, under the same numbers of blocks as
those of the served model, so the slots' tables and sampling settings serve both. Each guess is written to the words of
the served model's step on the device.

A pass is a step of rows with a last known token or a guess each; a row of the first pass has some tokens before it,
too (see `services.worker.speculative.draft_model`). First and later passes are captured for some numbers of rows.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import step_io
from kernels.sampling.slot_settings import SlotSettings
from kernels.slot_edits import HEADER
from kernels.step_io import StepInputs
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda.forward import GpuForward
from services.worker.runners.cuda.graphs import GUESS_ROWS, MOST_GUESS_TOKENS
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.step_words import Sizes, StepRows, empty_step
from services.worker.runners.cuda.upload import NO_EDITS, StepUpload
from services.worker.runners.step import Rows

Pending = tuple[int, Sequence[int]]
"""The position of the first token that the draft lacks, and the tokens from there to the last known one."""
_Pass = tuple[int, int]
"""Rows of a pass, and the most tokens of a row: 1 in later passes."""


class GpuDraftModel:
    """Guesses for rows of a `GpuRunner`. Its passes are launched before the runner's step, in the same stream."""

    lengths: Sequence[int] = (2,)
    """Most tokens of a row in the first passes that are captured; ascending."""

    def __init__(
        self,
        model: Decoder,
        ops: TritonOps,
        block_size: int,
        slots: int,
        step_tokens: int,
        stored: torch.dtype,
        tables: Tensor,
        settings: SlotSettings,
        target: Tensor,
    ) -> None:
        """tables int32 [slots + 1, B] and the settings are the runner's; target int32: the words of its steps on the
        device. The caller calls `allocate`."""
        device = model.embedding.device
        self.model, self.block_size, self._slots, self._step_tokens = model, block_size, slots, step_tokens
        self.kv = GpuPool(model.config, block_size, stored, device)
        self._target, self._short_tokens = target, ops.short_tokens
        self._upload = StepUpload(step_io.words_of(step_tokens, slots, slots), tables, settings)
        self.forward = GpuForward(model, ops, self.kv, self._upload.words, tables, settings)
        self._plans = torch.zeros(2, slots, dtype=torch.int32, device=device)
        """For each row of a pass: where its next guess goes in `target`, and the guesses that it still wants."""
        self._staged = torch.zeros(2, slots, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._graphs: dict[_Pass, Callable[[], None]] = {}

    # ---- start-up ----

    def allocate(self, blocks: int) -> None:
        """Allocate keys and values of blocks 1 to `blocks`. To be called before anything is captured."""
        self.kv.allocate(blocks)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the passes, the largest first. Nothing may be collected meanwhile."""
        pool = torch.cuda.graph_pool_handle()
        for rows, longest in self._passes():
            self._begin_empty(rows, longest)
            self._pass(rows, longest)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._pass(rows, longest)
            self._graphs[rows, longest] = graph.replay
        self._warm_up_catch_ups()

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch each kernel once, without capturing anything, so that all are compiled."""
        for rows, longest in self._passes():
            self._begin_empty(rows, longest)
            self._pass(rows, longest)
        self._warm_up_catch_ups()

    def _passes(self) -> list[_Pass]:
        """The passes that are captured, those with the most tokens first."""
        most = min(MOST_GUESS_TOKENS, self._step_tokens)
        held = {min(rows, self._slots) for rows in GUESS_ROWS}
        found = [(rows, longest) for rows in held for longest in (1, *self.lengths) if rows * longest <= most]
        return sorted(found, key=lambda each: (each[0] * each[1], each), reverse=True)

    def _warm_up_catch_ups(self) -> None:
        """Compile what no graph holds: attention of prompts, for each number of rows that has a kernel of its own."""
        for rows in sorted({min(rows, self._slots) for rows in GUESS_ROWS if rows >= 16}):
            sizes = min(MOST_GUESS_TOKENS, self._step_tokens), rows, 0
            self._send_rows(empty_step(), sizes)
            self._settle()
            self.forward.compute(sizes, sizes[0] - 1, self._first_features)

    def _begin_empty(self, rows: int, longest: int) -> None:
        self._send([], [], [], rows, longest)
        self._settle()

    def _settle(self) -> None:
        if self._target.is_cuda:
            torch.cuda.synchronize()

    # ---- guesses ----

    @torch.inference_mode()
    def launch(self, pending: Mapping[int, Pending], wanted: Mapping[int, int], places: Mapping[int, int]) -> None:
        """Compute the pending tokens, then the wanted guesses of each slot, and put these into the words of the step.

        places: for each slot with guesses, the index of its first guess among the step's tokens.
        """
        guessing = [slot for slot in pending if wanted.get(slot)]
        most = max((longest for rows, longest in self._graphs if rows >= len(guessing)), default=self.lengths[-1])
        late = {}
        for slot, (first, ids) in pending.items():
            before = ids[:-most] if wanted.get(slot) else ids
            if before:
                late[slot] = first, before
        if late:
            self._catch_up(late)
        if not guessing:
            return
        last = [list(pending[slot][1][-most:]) for slot in guessing]
        ends = [pending[slot][0] + len(pending[slot][1]) for slot in guessing]
        counts = [wanted[slot] for slot in guessing]
        rows, longest = self._held(len(guessing), max(map(len, last)))
        self._put_plans(counts, [places[slot] for slot in guessing], rows)
        self._send(guessing, last, ends, rows, longest)
        self._run(rows, longest)
        if max(counts) > 1:
            self._send(guessing, [[-1]] * len(guessing), [end + 1 for end in ends], rows, 1)
        for _ in range(max(counts) - 1):
            self._run(rows, 1)

    def _catch_up(self, pending: Mapping[int, Pending]) -> None:
        """Compute tokens without a guess: those before the ones of the first pass, if their slot wants guesses."""
        slots = [*pending]
        lengths = [len(ids) for _, ids in pending.values()]
        contexts = [first + len(ids) for first, ids in pending.values()]
        ids = np.array([token for _, tokens in pending.values() for token in tokens], np.int32)
        rows = StepRows(Rows(slots, lengths, [0] * len(slots), ids), contexts)
        self._send_rows(rows, rows.sizes)
        long_tokens = sum(length for length in lengths if length > self._short_tokens)
        self.forward.compute(rows.sizes, long_tokens, self._first_features)

    def _held(self, rows: int, longest: int) -> _Pass:
        """The smallest first pass with a graph for these numbers of rows and of tokens of each; without one, these."""
        fitting = [each for each in self._graphs if each[0] >= rows and each[1] >= max(longest, self.lengths[0])]
        return min(fitting, key=lambda each: each[0] * each[1], default=(rows, max(longest, self.lengths[0])))

    def _run(self, rows: int, longest: int) -> None:
        replay = self._graphs.get((rows, longest))
        if replay is not None:
            replay()
        else:
            self._pass(rows, longest)

    def _first_features(self, inputs: StepInputs) -> Tensor | None:
        """What the model reads beside the tokens of a first pass or a catch-up: nothing."""

    def _next_features(self, inputs: StepInputs) -> Tensor | None:
        """What it reads beside its own guesses, one of each row."""

    def _drew_from(self, x: Tensor) -> None:
        """The guesses of a pass are drawn from this residual stream, [rows, width]."""

    def _pass(self, rows: int, longest: int) -> None:
        """One guess of each row that still wants one, and the words of the next pass."""
        first = longest > 1
        features = self._first_features if first else self._next_features
        guesses, x = self.forward.guess((rows * longest, rows, rows), longest, features)
        self._drew_from(x)
        target, wanted = self._plans[:, :rows]
        # A row that wants no more writes its guess to the word behind those of the largest step.
        aim = torch.where(wanted > 0, target, len(self._target) - 1)
        self._target.index_copy_(0, aim.long(), guesses.int())
        target += 1
        wanted -= 1
        if first:
            return
        _, _, contexts, owners, chosen, _ = step_io.places_of(rows, rows, rows)
        words, done = self._upload.words, wanted <= 0
        words[contexts : contexts + rows] += 1
        words[contexts : contexts + rows].masked_fill_(done, 0)
        words[owners : owners + rows].masked_fill_(done, -1)
        words[chosen : chosen + rows].masked_fill_(done, -1)

    def _put_plans(self, counts: list[int], places: list[int], rows: int) -> None:
        """Send the plan. No earlier copy from the staging buffer is under way: a step with guesses is alone in flight,
        and is collected before the next one."""
        missing = [0] * (rows - len(counts))
        plan = torch.tensor([places + missing, counts + missing], dtype=torch.int32)
        self._staged[:, :rows] = plan
        self._plans[:, :rows].copy_(self._staged[:, :rows], non_blocking=True)

    def _send(self, slots: list[int], ids: list[list[int]], ends: list[int], rows: int, longest: int) -> None:
        """Send the words of a pass, padded to `rows` rows."""
        lengths = [len(tokens) for tokens in ids]
        flat = np.array([token for tokens in ids for token in tokens], np.int32)
        self._send_rows(StepRows(Rows(slots, lengths, [1] * len(slots), flat), ends), (rows * longest, rows, rows))

    def _send_rows(self, rows: StepRows, sizes: Sizes) -> None:
        number, buffer = self._upload.begin()
        end = rows.lay_out(self._upload.staging_buffers[buffer], HEADER, sizes)
        self._upload.send(buffer, end, NO_EDITS)
        self._upload.landed(number)  # At most three passes are sent for a step, and there are four buffers.
