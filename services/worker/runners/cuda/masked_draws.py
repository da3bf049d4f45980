"""Draws the tokens of rows with masks, behind all else that the GPU computes of their step. Knows lines, never slots'
forms.

A step's graph draws for these rows with the settings of the padding slot, which changes no sequence. Their masks follow
from the step before, and arrive while the GPU computes: then the logits are masked in place and drawn from again. So a
step without such rows is the same as if there were no masks.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import sampling, step_io
from kernels.sampling.slot_settings import Samples, SlotSettings
from kernels.sampling.token_mask import mask_logits
from services.worker.runners.base import Masks, Sampled
from services.worker.runners.cuda.logprobs import TopLogprobs


@dataclass(slots=True)
class MaskedRows:
    """The M rows of a step that draw under masks."""

    lines: list[int]
    """[M]: of the S lines of logits."""
    slots: list[int]
    """[S]: the slot of each line; of one that is not drawn from again, the padding slot."""
    positions: list[int]
    """[S]: the new token's position in its answer."""
    tops: TopLogprobs
    logits: Tensor | None = None
    """[S, V], once the step is launched."""
    drawn: list[tuple[int, float]] = field(default_factory=list)
    """[M]: token and log-probability, once the step is over."""


class MaskedDraws:
    """Masks and draws for one step at a time: the next step's masks are known only when this one is over. Only the
    parts of a step whose launch failed are in flight together; the later ones wait for the earlier."""

    def __init__(self, slots: int, vocab_size: int, settings: SlotSettings, last_token: Tensor) -> None:
        """slots: most rows of a step. settings and last_token [slots + 1]: of the slots."""
        self._slots, self._settings, self._last_token = slots, settings, last_token
        words, device = -(-vocab_size // 32), last_token.device
        self._head = 6 * slots
        """Words of the slots, positions and lines, each int64 [slots]. The masks follow."""
        sizes = self._head + slots * words
        pinned = last_token.is_cuda
        self._staged = torch.zeros(sizes, dtype=torch.int32, pin_memory=pinned)
        self._host_words = self._staged.numpy()
        """The staged words. NumPy writes them in this thread; torch would wake others for as much as this."""
        self._host_lists = self._host_words[: self._head].view(np.int64).reshape(3, slots)
        self._sent = torch.zeros(sizes, dtype=torch.int32, device=device)
        self._report = torch.zeros(3 * slots, dtype=torch.int32, device=device)
        self._host_report = torch.zeros(3 * slots, dtype=torch.int32, pin_memory=pinned)
        self._uploads: Any = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        """Masks are sent while the GPU computes the logits."""
        self._undrawn: MaskedRows | None = None
        """Of the step that was launched last."""
        self._uncollected: MaskedRows | None = None
        """The rows whose draws are, or will be, in the report."""

    def begin(self) -> None:
        """Before a step is launched: it may overwrite the logits of a part whose rows are not drawn yet."""
        if self._undrawn is not None and self._undrawn.logits is not None:
            self._undrawn.logits = self._undrawn.logits.clone()
            self._undrawn = None

    def launched(self, rows: MaskedRows, logits: Tensor) -> None:
        """A step with these rows was launched. logits [S, V]."""
        rows.logits = logits
        self._undrawn = rows

    @torch.inference_mode()
    def draw(self, rows: MaskedRows, masks: Masks) -> None:
        """Draw for these rows, after what is in the stream. masks [M, W]."""
        samples, count = len(rows.slots), len(rows.lines)
        assert rows.logits is not None
        assert len(masks) == count, f"{len(masks)} masks for {count} rows"
        if self._uncollected is not None:
            self._settle(self._uncollected)
        if self._undrawn is rows:
            self._undrawn = None
        self._uncollected = rows
        for place, numbers in enumerate((rows.slots, rows.positions, rows.lines)):
            self._host_lists[place, : len(numbers)] = numbers
        end = self._head + masks.size
        self._host_words[self._head : end] = masks.reshape(-1)
        self._send(end)
        drawn = self._launch(rows.logits, count, end)
        self._host_report[: 3 * samples].copy_(self._report[: 3 * samples], non_blocking=True)
        rows.tops.send(rows.logits, drawn.totals)

    def warm_up(self, logits: Tensor) -> None:
        """Launch the kernels on these logits [S, V], which are destroyed, for the padding slot."""
        self._host_lists[0], self._host_lists[1:] = self._slots, 0
        self._sent.copy_(self._staged)
        self._launch(logits, 1, self._head + (len(self._sent) - self._head) // self._slots)

    def collect(self, rows: MaskedRows) -> None:
        """Note what the rows have drawn. The step is over."""
        if self._uncollected is not rows:
            assert rows.drawn, "the rows were not drawn"
            return
        self._uncollected = None
        samples = len(rows.slots)
        tokens = self._host_report[:samples].tolist()
        logprobs = self._host_report[samples : 2 * samples].view(torch.float32).tolist()
        rows.drawn = [(tokens[line], logprobs[line]) for line in rows.lines]

    def _settle(self, rows: MaskedRows) -> None:
        """Wait for the draws of an earlier part."""
        if self._uploads is not None:
            torch.cuda.synchronize()
        self.collect(rows)

    def _send(self, end: int) -> None:
        """Copy the first `end` words to the device. What is in the stream does not read them; what follows waits."""
        if self._uploads is None:
            self._sent[:end].copy_(self._staged[:end])
            return
        with torch.cuda.stream(self._uploads):
            self._sent[:end].copy_(self._staged[:end], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._uploads)

    def _launch(self, logits: Tensor, count: int, end: int) -> Samples:
        samples = len(logits)
        slots, positions, lines = self._sent[: self._head].view(torch.int64).view(3, self._slots)
        mask_logits(logits, lines[:count], self._sent[self._head : end].view(count, -1))
        drawn = sampling.sample(logits, self._settings, slots[:samples], positions[:samples])
        report = self._report[: 3 * samples].view(3, samples)
        step_io.store_sampled(drawn.tokens, drawn.logprobs, drawn.totals, slots[:samples], self._last_token, report)
        return drawn


def merged(sampled: Sampled, rows: MaskedRows) -> Sampled:
    """What a step has drawn, with the draws of these rows."""
    tops = rows.tops.lists()
    logprobs = sampled.logprobs
    if rows.tops.wanted and logprobs is None:
        logprobs = [[float("nan")] for _ in sampled.tokens]
    all_tops = sampled.tops
    if tops is not None and all_tops is None:
        all_tops = [[[]] for _ in sampled.tokens]
    for line, (token, logprob) in zip(rows.lines, rows.drawn, strict=True):
        sampled.tokens[line] = [token]
        if logprobs is not None:
            logprobs[line] = [logprob]
        if tops is not None and all_tops is not None:
            all_tops[line] = tops[line]
    return Sampled(sampled.tokens, logprobs, all_tops)
