"""Draws the tokens of rows with masks, behind all else that the GPU computes of their step. Knows lines, never slots'
forms.

A step's graph draws for these rows with the settings of the padding slot, which changes no sequence. Their masks follow
from the step before, and arrive while the GPU computes: then the logits are masked in place and drawn from again. So a
step without such rows is the same as if there were no masks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import sampling, step_io
from kernels.drafts import guesses
from kernels.sampling.slot_settings import Samples, SlotSettings
from kernels.sampling.token_mask import mask_logits
from kernels.step_io import StepInputs
from services.worker.runners.base import Masks, Sampled
from services.worker.runners.cuda.logprobs import TopLogprobs


class _Graph(NamedTuple):
    """Captured masks and draws, for all lines of some logits."""

    replay: Callable[[], None]
    drawn: Samples


@dataclass(slots=True)
class MaskedRows:
    """The rows of a step that draw under masks: M of the S lines of its logits, one for each token that is drawn."""

    lines: list[int]
    """[M]."""
    slots: list[int]
    """[S]: the slot of each line; of one that is not drawn from again, the padding slot."""
    positions: list[int]
    """[S]: the new token's position in its answer."""
    tops: TopLogprobs
    rows: int = 0
    """Rows of a step with guesses; 0: it has none."""
    logits: Tensor | None = None
    """[S, V], once the step is launched."""
    guessed: StepInputs | None = None
    """The inputs of a step with guesses, once it is launched."""
    drawn: list[tuple[int, float]] = field(default_factory=list)
    """[M]: token and log-probability, once the step is over."""
    kept: list[int] = field(default_factory=list)
    """Of a step with guesses: how many draws each row keeps, once it is over."""


class MaskedDraws:
    """Masks and draws for one step at a time: the next step's masks are known only when this one is over. Only the
    parts of a step whose launch failed are in flight together; the later ones wait for the earlier."""

    def __init__(self, most: int, vocab_size: int, settings: SlotSettings, last_token: Tensor) -> None:
        """most: draws of a step. settings and last_token [slots + 1]: of the slots."""
        self._most, self._settings, self._last_token = most, settings, last_token
        words, device = -(-vocab_size // 32), last_token.device
        self._head = 6 * most
        """Words of the slots, positions and lines, each int64 [most]. The masks follow."""
        sizes = self._head + most * words
        pinned = last_token.is_cuda
        self._staged = torch.zeros(sizes, dtype=torch.int32, pin_memory=pinned)
        self._host_words = self._staged.numpy()
        """The staged words. NumPy writes them in this thread; torch would wake others for as much as this."""
        self._host_lists = self._host_words[: self._head].view(np.int64).reshape(3, most)
        self._sent = torch.zeros(sizes, dtype=torch.int32, device=device)
        self._report = torch.zeros(4 * most, dtype=torch.int32, device=device)
        """Three lists of S, as `step_io.store_sampled` writes them; then of a step with guesses what each row keeps."""
        self._host_report = torch.zeros(4 * most, dtype=torch.int32, pin_memory=pinned)
        self._no_slots = torch.empty_like(last_token)
        """Where the last draws of rows with guesses go: they may not be kept."""
        self._uploads: Any = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        """Masks are sent while the GPU computes the logits."""
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """By the address of the logits that captured steps leave, and their number of lines."""
        self._undrawn: MaskedRows | None = None
        """Of the step that was launched last."""
        self._uncollected: MaskedRows | None = None
        """The rows whose draws are, or will be, in the report."""

    def begin(self) -> None:
        """Before a step is launched: it may overwrite what the draws of an earlier part read."""
        rows, self._undrawn = self._undrawn, None
        if rows is not None and rows.logits is not None:
            rows.logits = rows.logits.clone()
            if rows.guessed is not None:
                rows.guessed = _copied(rows.guessed)

    def launched(self, rows: MaskedRows, logits: Tensor, guessed: StepInputs | None) -> None:
        """A step with these rows was launched. logits [S', V], of which lines from S on are padding; guessed: its
        inputs, if it has guesses: then padding is left out."""
        padding = len(logits) - len(rows.slots)
        if guessed is None:
            rows.slots += [len(self._last_token) - 1] * padding
            rows.positions += [0] * padding
        rows.logits, rows.guessed = logits[: len(rows.slots)], guessed
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
        self._host_lists[2, count:samples] = -1
        end = self._head + masks.size
        self._host_words[self._head : end] = masks.reshape(-1)
        self._send(end)
        graph = self._graphs.get((rows.logits.data_ptr(), samples)) if rows.guessed is None else None
        if graph is not None:
            graph.replay()
        drawn = graph.drawn if graph is not None else self._launch(rows.logits, count, rows.guessed)
        rows.tops.send(rows.logits, drawn.totals)

    def warm_up(self, logits: Tensor) -> None:
        """Launch the kernels on these logits [S, V] for the padding slot."""
        self._host_lists[0], self._host_lists[1], self._host_lists[2] = len(self._last_token) - 1, 0, -1
        self._sent.copy_(self._staged)
        self._launch(logits, 1)

    def capture(self, logits: Tensor, pool: Any) -> None:
        """Capture masks and draws for the logits [S, V] that a captured step leaves, with memory from this pool. To
        launch the kernels one by one takes the host half a millisecond, in which the GPU may have nothing to do."""
        self.warm_up(logits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            drawn = self._launch(logits, len(logits))
        self._graphs[logits.data_ptr(), len(logits)] = _Graph(graph.replay, drawn)

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
        rows.kept = self._host_report[3 * samples : 3 * samples + rows.rows].tolist()

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

    def _launch(self, logits: Tensor, count: int, guessed: StepInputs | None = None) -> Samples:
        """Mask up to `count` lines, draw from all, and copy the report to the host."""
        samples, settings, into = len(logits), self._settings, self._last_token
        slots, positions, lines = self._sent[: self._head].view(torch.int64).view(3, self._most)
        slots, positions = slots[:samples], positions[:samples]
        mask_logits(logits, lines[:count], self._sent[self._head :].view(self._most, -1)[:count])
        if guessed is None:
            drawn = sampling.sample(logits, settings, slots, positions)
        else:
            drawn, into = self._draw_along(logits, slots, positions, guessed), self._no_slots
        report = self._report[: 3 * samples].view(3, samples)
        step_io.store_sampled(drawn.tokens, drawn.logprobs, drawn.totals, slots, into, report)
        reported = 3 * samples + (len(guessed.contexts) if guessed is not None else 0)
        self._host_report[:reported].copy_(self._report[:reported], non_blocking=True)
        return drawn

    def _draw_along(self, logits: Tensor, slots: Tensor, positions: Tensor, guessed: StepInputs) -> Samples:
        """Draw after each guess, and move the slots behind the draws that are kept."""
        assert guessed.places is not None
        samples, rows = len(logits), len(guessed.contexts)
        token_ids, kept = guessed.token_ids[:samples], self._report[3 * samples : 3 * samples + rows]
        drawn = sampling.sample(
            logits, self._settings, slots, positions, guesses=token_ids, places=guessed.places[:samples]
        )
        guesses.accept(
            drawn.tokens, drawn.totals, token_ids, guessed.starts, slots, positions, self._settings, self._last_token,
            kept,
        )  # fmt: skip
        return drawn


def _copied(inputs: StepInputs) -> StepInputs:
    """Those that draws along guesses read."""
    assert inputs.places is not None
    copies = (inputs.token_ids, inputs.starts, inputs.contexts, inputs.places)
    token_ids, starts, contexts, places = (each.clone() for each in copies)
    return replace(inputs, token_ids=token_ids, starts=starts, contexts=contexts, places=places)


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
