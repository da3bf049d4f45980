"""A small model beside the served one that guesses tokens, on a GPU: all guesses of a step before the host looks again.

Knows slots and blocks, never jobs. Its keys and values are in a pool of its own, under the same numbers of blocks as
those of the served model, so the slots' tables and sampling settings serve both. Its guesses stay in a table on the
device, where the served model's step reads them.

A pass is a step of rows with a last known token or a guess each; a row of the first pass may have some tokens before
it, too (see `services.worker.speculative.draft_model`). Other tokens that the draft lacks are caught up before it, in
captured steps of their own, from which nothing is drawn. One captured pass of one token a row serves as first and later
pass. The words of all passes are sent once: each pass makes those of the next one (see `kernels.drafts.draft_pass`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import step_io
from kernels.drafts import draft_pass
from kernels.sampling.slot_settings import SlotSettings
from kernels.slot_edits import HEADER
from kernels.step_io import StepInputs
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda.forward import GpuForward
from services.worker.runners.cuda.graphs import GUESS_ROWS, MOST_GUESS_TOKENS
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.step_words import Sizes, StepRows, empty_step, put
from services.worker.runners.cuda.upload import NO_EDITS, StepUpload
from services.worker.runners.step import DEVICE_CATCH_UP_TOKENS, Rows

Pending = tuple[int, Sequence[int]]
"""The position of the first token that the draft lacks, and the tokens from there to the last known one."""
CATCH_UP_TOKENS = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, DEVICE_CATCH_UP_TOKENS + 1, 256))
"""Tokens of the catch-ups that are captured. `DraftProgress` asks for no more in a step."""
CATCH_UP_ROWS = 8, GUESS_ROWS[-1]
"""Rows of the catch-ups that are captured. More answers are not guessed."""
_Pass = tuple[int, int]
"""Rows of a pass, and the most tokens of a row: 1 in later passes."""


class Guessed(NamedTuple):
    """A row of a first pass."""

    slot: int
    ids: Sequence[int]
    """Its last tokens, up to the last known one."""
    end: int
    """All its known tokens."""
    wanted: int
    """Its guesses."""


class CheckedStep(NamedTuple):
    """A launched step with guesses, as it is on the device."""

    words: Tensor
    sizes: Sizes
    kept: Tensor
    """int32 [R]: draws that each row keeps."""
    last_token: Tensor
    """int64 [slots + 1]: the last of them."""


class GpuDraftModel:
    """Guesses for rows of a `GpuRunner`. Its passes are launched before the runner's step, in the same stream."""

    lengths: Sequence[int] = (1, 2)
    """Most tokens of a row in the first passes that are captured; ascending."""
    most_tokens = MOST_GUESS_TOKENS
    """Tokens of a pass that is captured, at most."""
    redoes_guesses = False
    """Whether it computes right guesses once more."""

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
        guesses: Tensor,
    ) -> None:
        """tables int32 [slots + 1, B] and the settings are the runner's; guesses int32 [slots + 1, most]: the table in
        which its steps read own guesses. The caller calls `allocate`."""
        device = model.embedding.device
        self.model, self.block_size, self._slots, self._step_tokens = model, block_size, slots, step_tokens
        self.kv = GpuPool(model.config, block_size, stored, device)
        self._guesses, self._short_tokens = guesses, ops.short_tokens
        most = max(step_tokens, self.most_tokens)
        words = draft_pass.lists_of(slots)[-1] + step_io.words_of(most, slots, max(slots, self.most_tokens))
        self._upload = StepUpload(words, tables, settings)
        self.forward = GpuForward(model, ops, self.kv, self._upload.words, tables, settings)
        self._graphs: dict[_Pass, Callable[[], None]] = {}
        """The largest first."""
        self._catch_ups: dict[Sizes, Callable[[], None]] = {}
        """The largest first."""

    # ---- start-up ----

    def allocate(self, blocks: int) -> None:
        """Allocate keys and values of blocks 1 to `blocks`. To be called before anything is captured."""
        self.kv.allocate(blocks)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture catch-ups and passes, the largest first. Nothing may be collected meanwhile."""
        pool = torch.cuda.graph_pool_handle()

        def captured(launch: Callable[[], None]) -> Callable[[], None]:
            launch()  # compiles, and lets libraries make what they need
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                launch()
            return graph.replay

        for sizes in self._catch_up_sizes():
            self._catch_ups[sizes] = captured(self._empty_catch_up(sizes))
        for each in self._passes():
            self._graphs[each] = captured(self._empty_pass(*each))
        self._warm_up_follow()

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch each kernel once, without capturing anything, so that all are compiled."""
        for sizes in self._catch_up_sizes():
            self._empty_catch_up(sizes)()
        for each in self._passes():
            self._empty_pass(*each)()
        self._warm_up_follow()

    def _catch_up_sizes(self) -> list[Sizes]:
        """Sizes of the catch-ups that are captured, the largest first."""
        tokens = {min(count, self._step_tokens) for count in CATCH_UP_TOKENS}
        sizes = {(count, min(rows, self._slots, count), 0) for count in tokens for rows in CATCH_UP_ROWS}
        return sorted(sizes, reverse=True)

    def _passes(self) -> list[_Pass]:
        """The passes that are captured, those with the most tokens first."""
        most = min(self.most_tokens, self._step_tokens)
        held = {min(rows, self._slots) for rows in GUESS_ROWS}
        found = [(rows, longest) for rows in held for longest in self._pass_lengths() if rows * longest <= most]
        return sorted(found, key=lambda each: (each[0] * each[1], each), reverse=True)

    def _pass_lengths(self) -> set[int]:
        """Most tokens of a row, of all passes."""
        return {1, *self.lengths}

    def _warm_up_follow(self) -> None:
        """Compile the kernel that begins passes behind a step."""
        words, last, guesses = self._upload.words, self.forward.last_token, self._guesses
        draft_pass.follow(words, (1, 1, 1), 0, guesses, last, guesses, words, 1, redo=self.redoes_guesses)

    def _empty_pass(self, rows: int, longest: int) -> Callable[[], None]:
        """Send the words of a pass without rows. -> what launches it."""
        self._send([], rows, longest)
        self._settle()
        return partial(self._pass, rows, longest)

    def _empty_catch_up(self, sizes: Sizes) -> Callable[[], None]:
        """As `_empty_pass`, of a catch-up."""
        self._send_rows(empty_step(), sizes)
        self._settle()
        return partial(self._compute, sizes, sizes[0] - 1)  # one less: there may also be short rows

    def _settle(self) -> None:
        if self._guesses.is_cuda:
            torch.cuda.synchronize()

    # ---- guesses ----

    @torch.inference_mode()
    def launch(self, pending: Mapping[int, Pending], wanted: Mapping[int, int]) -> None:
        """Compute the pending tokens, then the wanted guesses of each slot, which go to the table."""
        guessing = {slot: known for slot, known in pending.items() if wanted.get(slot)}
        most = self._most_known(len(guessing), max(wanted.values(), default=0))
        late = {}
        for slot, (first, ids) in pending.items():
            before = ids[:-most] if slot in guessing else ids
            if before:
                late[slot] = first, before
        if late:
            self._catch_up(late)
        if guessing:
            self._guess(
                [Guessed(slot, ids[-most:], first + len(ids), wanted[slot]) for slot, (first, ids) in guessing.items()]
            )

    def _most_known(self, rows: int, guesses: int) -> int:
        """The most tokens up to the last known one that a first pass has of each row."""
        return max((longest for held, longest in self._graphs if held >= rows), default=self.lengths[-1])

    def _guess(self, found: list[Guessed]) -> None:
        """Launch the passes of these rows."""
        rows, longest = self._held(len(found), max(len(row.ids) for row in found))
        self._send(found, rows, longest)
        self._run(rows, longest)
        for _ in range(max(row.wanted for row in found) - 1):
            self._run(rows, 1)

    @torch.inference_mode()
    def follow(self, rows: StepRows, checked: CheckedStep, covered: Sequence[int]) -> dict[int, int]:
        """Launch as many guesses for each row of a step as it had, or more where they cost nothing. covered: tokens for
        which each slot has blocks. -> the guesses by slot: none if there may be more tokens than that, or passes that
        would need memory: the step is launched."""
        slots, had = rows.rows.slots, [length - 1 for length in rows.rows.lengths]
        room = [
            min(covered[slot], self.model.max_positions) - end for slot, end in zip(slots, rows.contexts, strict=True)
        ]
        free = self._free_guesses(len(slots), max(had))
        for all_of in sorted({free, 0}, reverse=True):
            guesses = [all_of or count if count else 0 for count in had]
            if all(count <= most for count, most in zip(guesses, room, strict=True)):
                launched = self._guess_behind(checked, len(slots), max(had), all_of)
                return {slot: count for slot, count in zip(slots, guesses, strict=True) if count and launched}
        return {}

    def _free_guesses(self, rows: int, guesses: int) -> int:
        """How many guesses of each row cost no more than those of rows with up to `guesses`; 0: none are free."""
        return 0

    def _guess_behind(self, checked: CheckedStep, count: int, guesses: int, all_of: int) -> bool:
        """Launch the passes behind a step of `count` rows with up to `guesses` guesses. all_of: guesses of each row; 0:
        as many as it had. -> False if there are no graphs of them."""
        rows, longest = self._held(count, 1 + guesses if self.redoes_guesses else 2)
        if (rows, longest) not in self._graphs or (rows, 1) not in self._graphs:
            return False
        draft_pass.follow(
            checked.words, checked.sizes, count, checked.kept, checked.last_token, self._guesses, self._upload.words,
            rows, longest, self.redoes_guesses,
        )  # fmt: skip
        self._run(rows, longest)
        for _ in range(guesses - 1):
            self._run(rows, 1)
        return True

    def _catch_up(self, pending: Mapping[int, Pending]) -> None:
        """Compute tokens without a guess: those before the ones of the first pass, if their slot wants guesses."""
        slots = [*pending]
        lengths = [len(ids) for _, ids in pending.values()]
        contexts = [first + len(ids) for first, ids in pending.values()]
        ids = np.array([token for _, tokens in pending.values() for token in tokens], np.int32)
        rows = StepRows(Rows(slots, lengths, [0] * len(slots), ids), contexts)
        tokens, count, _ = rows.sizes
        fitting = [sizes for sizes in self._catch_ups if tokens <= sizes[0] and count <= sizes[1]]
        self._send_rows(rows, fitting[-1] if fitting else rows.sizes)
        if fitting:
            self._catch_ups[fitting[-1]]()
        else:
            self._compute(rows.sizes, sum(length for length in lengths if length > self._short_tokens))

    def _compute(self, sizes: Sizes, long_tokens: int) -> None:
        """A catch-up whose words are on the device. long_tokens: of rows of more tokens than short ones."""
        self.forward.compute(sizes, long_tokens, self._first_features)

    def _held(self, rows: int, longest: int) -> _Pass:
        """The smallest first pass with a graph for these numbers of rows and of tokens of each; without one, these."""
        longest = max(longest, self.lengths[0])
        fitting = [each for each in self._graphs if each[0] >= rows and each[1] >= longest]
        return fitting[-1] if fitting else (rows, longest)

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
        words = self._upload.words
        if longest == 1:
            drawn, slots, x = self.forward.guess(words, rows, 1, self._next_features)
        else:
            own = words[draft_pass.lists_of(rows)[-1] :]
            drawn, slots, x = self.forward.guess(own, rows, longest, self._first_features)
        self._drew_from(x)
        draft_pass.advance(drawn, slots, self.forward.last_token, words, self._guesses)

    def _send(self, found: list[Guessed], rows: int, longest: int) -> None:
        """Send the words of a pass of one token a row, padded to `rows` rows, and behind them those of a first pass of
        more tokens a row."""
        number, buffer = self._upload.begin()
        words = self._upload.staging_buffers[buffer]
        laid = words_of(found, rows, self._guesses.shape[1])
        put(words, HEADER, laid)
        end = HEADER + len(laid)
        if longest > 1:
            end = _last_tokens(found, longest).lay_out(words, end, (rows * longest, rows, rows))
        self._upload.send(buffer, end, NO_EDITS)
        self._upload.landed(number)  # At most two are sent for a step, and there are four buffers.

    def _send_rows(self, rows: StepRows, sizes: Sizes) -> None:
        number, buffer = self._upload.begin()
        end = rows.lay_out(self._upload.staging_buffers[buffer], HEADER, sizes)
        self._upload.send(buffer, end, NO_EDITS)
        self._upload.landed(number)


def words_of(found: list[Guessed], rows: int, most: int) -> list[int]:
    """The words of a pass of one token a row, padded to `rows` rows, as `kernels.drafts.draft_pass` defines them. most:
    guesses of a slot in the table. The device is idle until it has them, so they are one list, without `StepRows`."""
    count, length = len(found), step_io.aligned(rows)
    none, starts = [0] * (length - count), [count] * (step_io.aligned(rows + 1) - count)
    return [
        *[row.ids[-1] for row in found], *none, *range(count), *starts, *[row.end for row in found], *none,
        *[row.slot for row in found], *none, *range(count), *[-1] * (length - count),
        *[row.slot * most for row in found], *none, *[row.wanted for row in found], *none,
    ]  # fmt: skip


def _last_tokens(found: list[Guessed], most: int) -> StepRows:
    """The last tokens of each row, `most` at most; a guess is drawn after them."""
    ids = [row.ids[-most:] for row in found]
    flat = np.array([token for tokens in ids for token in tokens], np.int32)
    rows = Rows([row.slot for row in found], [*map(len, ids)], [1] * len(found), flat)
    return StepRows(rows, [row.end for row in found])
