"""A runner whose steps cost a set time and no memory. It serves to measure and test all that surrounds a model.

A token is a function of (seed, sample index, position), so a moved or preempted answer continues as it began. Knows the
packed step, no tensors and no model.
"""

import hashlib
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.runners.base import Sampled, StepResult, Top
from services.worker.runners.step import Edit, Rows, SlotState, Words, unpack

_RUN = 8  # tokens drawn from one digest


@dataclass(frozen=True, slots=True)
class PacedTiming:
    """How long steps take. They end at multiples of `step_s` on the machine's monotonic clock, so that the receiver of
    a token in another process can compute the token's age."""

    step_s: float = 0.01
    """Seconds of a step that only decodes, whatever the batch; 0: as fast as possible."""
    prefill_rate: float = 0.0
    """Prompt tokens computed per second, on top of the step; 0: any number."""

    def end(self, began: float, prefill_tokens: int) -> float:
        """When a step with so many prompt tokens ends."""
        computed = began + (prefill_tokens / self.prefill_rate if self.prefill_rate else 0.0)
        return (math.floor(computed / self.step_s) + 1) * self.step_s if self.step_s else computed


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A launched step: what it draws, and when it ends."""

    result: StepResult
    ends: float


@dataclass(slots=True)
class _Slot:
    """The sequence in a slot."""

    seed: int
    sample_index: int
    prompt_len: int
    computed: int
    logprobs: int
    run: int = -1
    """Which run of the answer's tokens is in `drawn`."""
    drawn: Sequence[int] = ()


class PacedRunner:
    """A `Runner` without a model.

    Sampling is reduced to what lengths and ends need: tokens of the vocabulary but its end tokens, all equally likely
    (so are the log-probabilities). Temperature, penalties, biases and bans change nothing.
    """

    depth = 1
    kv = None
    """Its blocks have no contents."""

    def __init__(self, vocab_size: int, end_tokens: Collection[int], slots: int, timing: PacedTiming) -> None:
        """slots: most sequences in the batch."""
        self.timing = timing
        self._vocab_size, self._end_tokens = vocab_size, list(end_tokens)
        self._vocabulary = [token for token in range(vocab_size) if token not in end_tokens]
        self._logprob = -math.log(len(self._vocabulary))
        self._slots = [_Slot(0, 0, 0, 0, -1)] * slots

    def launch(self, words: Words) -> PacedStep:
        """Draw the step's tokens; its time begins now."""
        began = time.monotonic()
        edits, rows = unpack(words)
        for edit, slot, data in edits:
            if edit is Edit.ADMIT:
                self._admit(slot, SlotState.read(data))
        prefill, at, ids = 0, 0, rows.ids.tolist()
        for length in rows.lengths:
            prefill += length if ids[at] >= 0 else 0
            at += length
        sampled = self._sample(rows)
        return PacedStep(StepResult([True] * len(rows.slots), sampled), self.timing.end(began, prefill))

    def done(self, step: PacedStep) -> bool:
        """Whether the step's time is over."""
        return time.monotonic() >= step.ends

    def collect(self, step: PacedStep) -> StepResult:
        """Sleep until the step ends."""
        if self.timing.step_s:  # A late step also lets the event loop's thread run.
            time.sleep(max(step.ends - time.monotonic(), 0.0))
        return step.result

    def run(self, words: Words) -> StepResult:
        """Launch a step and collect it."""
        return self.collect(self.launch(words))

    def inspect(self, token_ids: Sequence[int]) -> "EqualChances":
        """The logits of equal chances."""
        return EqualChances(len(token_ids), self._vocab_size, self._end_tokens)

    def _admit(self, slot: int, state: SlotState) -> None:
        seed = state.seed_low & 0xFFFFFFFF | (state.seed_high & 0xFFFFFFFF) << 32
        self._slots[slot] = _Slot(seed, state.sample_index, state.prompt_len, state.computed, state.logprobs)

    def _sample(self, rows: Rows) -> Sampled:
        tokens: list[list[int]] = []
        asked: list[int] = []
        for number, length, samples in zip(rows.slots, rows.lengths, rows.samples, strict=True):
            slot = self._slots[number]
            slot.computed += length
            if samples:
                tokens.append([self._draw(slot, slot.computed - slot.prompt_len)])
                asked.append(slot.logprobs)
        if max(asked, default=-1) < 0:
            return Sampled(tokens, None, None)
        likely: Top = [(token, self._logprob) for token in self._vocabulary[: max(asked)]]
        return Sampled(tokens, [[self._logprob] for _ in asked], [[likely[: max(count, 0)]] for count in asked])

    def _draw(self, slot: _Slot, position: int) -> int:
        """The token at a position of the answer. The tokens of a run are drawn together."""
        run = position // _RUN
        if slot.run != run:
            slot.run, slot.drawn = run, tokens_of(slot.seed, slot.sample_index, run, self._vocabulary)
        return slot.drawn[position % _RUN]


@dataclass(frozen=True, slots=True)
class EqualChances:
    """An `Inspection` of a model to which all tokens but the end tokens are equally likely."""

    tokens: int
    vocab_size: int
    end_tokens: list[int]

    def logits(self) -> npt.NDArray[np.float32]:
        """Zeros [T, V], and minus infinity for the end tokens."""
        logits = np.zeros((self.tokens, self.vocab_size), np.float32)
        logits[:, self.end_tokens] = -np.inf
        return logits


def tokens_of(seed: int, sample_index: int, run: int, vocabulary: list[int]) -> list[int]:
    """The tokens at positions `run * 8` to `run * 8 + 7` of the answer that these determine."""
    name = seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little") + run.to_bytes(4, "little")
    digest = hashlib.blake2b(name, digest_size=4 * _RUN).digest()
    return [
        vocabulary[int.from_bytes(digest[index : index + 4], "little") % len(vocabulary)]
        for index in range(0, 4 * _RUN, 4)
    ]
