"""A small model beside the served one that guesses tokens, on a GPU: all guesses of a step before the host looks again.

Knows slots and blocks, never jobs. Its keys and values are in a pool of its own, under the same numbers of blocks as
those of the served model, so the slots' tables and sampling settings serve both. Each guess is written to the words of
the served model's step on the device.

A pass is a step of rows with a last known token or a guess each; the first pass has two tokens a row (see
`services.worker.speculative.draft_model`). Both are captured for some numbers of rows; later passes replay the second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import step_io
from kernels.sampling.slot_settings import SlotSettings
from kernels.slot_edits import HEADER
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda.forward import GpuForward
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.step_words import Sizes, StepRows, empty_step
from services.worker.runners.cuda.upload import NO_EDITS, StepUpload
from services.worker.runners.step import Rows

FIRST = 2
"""Tokens of a row in the first pass."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the passes that are captured."""
_CATCH_UP_TOKENS = 320
Pending = tuple[int, Sequence[int]]
"""The position of the first token that the draft lacks, and the tokens from there to the last known one."""


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: int
    first: bool
    replay: Callable[[], None]


class GpuDraftModel:
    """Guesses for rows of a `GpuRunner`. Its passes are launched before the runner's step, in the same stream."""

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
        device. The caller allocates the pool, `kv`."""
        device = model.embedding.device
        self.model, self.block_size, self._slots, self._step_tokens = model, block_size, slots, step_tokens
        self.kv = GpuPool(model.config, block_size, stored, device)
        self._target = target
        self._upload = StepUpload(step_io.words_of(step_tokens, slots, slots), tables, settings)
        self.forward = GpuForward(model, ops, self.kv, self._upload.words, tables, settings)
        self._plans = torch.zeros(2, slots, dtype=torch.int32, device=device)
        """For each row of a pass: where its next guess goes in `target`, and the guesses that it still wants."""
        self._staged = torch.zeros(2, slots, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._graphs: list[_Graph] = []

    # ---- start-up ----

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the passes, the largest first. Nothing may be collected meanwhile."""
        pool = torch.cuda.graph_pool_handle()
        for rows in sorted({min(rows, self._slots) for rows in ROWS}, reverse=True):
            for first in (True, False):
                if rows * FIRST > self._step_tokens:
                    continue
                self._begin_empty(rows, first)
                self._pass(rows, first)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._pass(rows, first)
                self._graphs.insert(0, _Graph(rows, first, graph.replay))
        self._warm_up_catch_ups()

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch each kernel once, without capturing anything, so that all are compiled."""
        for rows in sorted({min(rows, self._slots) for rows in ROWS}):
            for first in (True, False):
                if rows * FIRST <= self._step_tokens:
                    self._begin_empty(rows, first)
                    self._pass(rows, first)
        self._warm_up_catch_ups()

    def _warm_up_catch_ups(self) -> None:
        """Compile what no graph holds: attention of prompts, for each number of rows that has a kernel of its own."""
        for rows in sorted({min(rows, self._slots) for rows in ROWS if rows >= 16}):
            sizes = min(max(FIRST * rows, _CATCH_UP_TOKENS), self._step_tokens), rows, 0
            self._send_rows(empty_step(), sizes)
            self._settle()
            self.forward.compute(sizes, sizes[0] - 1)

    def _begin_empty(self, rows: int, first: bool) -> None:
        self._send([], [], [], rows, first)
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
        late = {slot: entry for slot, entry in pending.items() if len(entry[1]) != FIRST or not wanted.get(slot)}
        if late:
            self._catch_up(late)
        guessing = [slot for slot in pending if wanted.get(slot)]
        if not guessing:
            return
        rows = self._held(len(guessing))
        ids = [list(pending[slot][1][-FIRST:]) for slot in guessing]
        ends = [pending[slot][0] + len(pending[slot][1]) for slot in guessing]
        counts = [wanted[slot] for slot in guessing]
        self._put_plans(counts, [places[slot] for slot in guessing], rows)
        self._send(guessing, ids, ends, rows, first=True)
        self._run(rows, first=True)
        if max(counts) > 1:
            self._send(guessing, [[-1]] * len(guessing), [end + 1 for end in ends], rows, first=False)
        for _ in range(max(counts) - 1):
            self._run(rows, first=False)

    def _catch_up(self, pending: Mapping[int, Pending]) -> None:
        """Compute tokens without a guess, all but those that the first pass computes."""
        slots = [*pending]
        lengths = [len(ids) for _, ids in pending.values()]
        contexts = [first + len(ids) for first, ids in pending.values()]
        ids = np.array([token for _, tokens in pending.values() for token in tokens], np.int32)
        rows = StepRows(Rows(slots, lengths, [0] * len(slots), ids), contexts)
        self._send_rows(rows, rows.sizes)
        self.forward.compute(rows.sizes, sum(lengths))

    def _held(self, rows: int) -> int:
        """The rows of the smallest graph that serves `rows`; without one, `rows`."""
        return min((graph.rows for graph in self._graphs if graph.rows >= rows), default=rows)

    def _run(self, rows: int, first: bool) -> None:
        graph = next((graph for graph in self._graphs if (graph.rows, graph.first) == (rows, first)), None)
        if graph is not None:
            graph.replay()
        else:
            self._pass(rows, first)

    def _pass(self, rows: int, first: bool) -> None:
        """One guess of each row that still wants one, and the words of the next pass."""
        tokens = rows * FIRST if first else rows
        guesses = self.forward.guess((tokens, rows, rows), FIRST if first else 1)
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

    def _send(self, slots: list[int], ids: list[list[int]], ends: list[int], rows: int, first: bool) -> None:
        """Send the words of a pass, padded to `rows` rows."""
        lengths = [len(tokens) for tokens in ids]
        flat = np.array([token for tokens in ids for token in tokens], np.int32)
        size = rows * FIRST if first else rows
        self._send_rows(StepRows(Rows(slots, lengths, [1] * len(slots), flat), ends), (size, rows, rows))

    def _send_rows(self, rows: StepRows, sizes: Sizes) -> None:
        number, buffer = self._upload.begin()
        end = rows.lay_out(self._upload.staging_buffers[buffer], HEADER, sizes)
        self._upload.send(buffer, end, NO_EDITS)
        self._upload.landed(number)  # At most three passes are sent for a step, and there are four buffers.
