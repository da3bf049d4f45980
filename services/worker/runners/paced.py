"""A runner whose steps cost a set time and no memory. It serves to measure and test all that surrounds a model.

A token is a function of (seed, sample index, position), so a moved or preempted answer continues as it began. Knows the
packed step, no tensors and no model.
"""

import hashlib
import math
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.runners.base import NO_SCORES, NOTHING_SAMPLED, Masks, Sampled, Scores, StepResult, Top
from services.worker.runners.scored_rows import ScoredRows
from services.worker.runners.step import LAST_TOKEN, OWN_GUESS, Edit, Rows, SlotState, Words, unpack

_RUN = 8  # tokens drawn from one digest
_NUMBERS = struct.Struct(f"<{_RUN}I")


@dataclass(frozen=True, slots=True)
class PacedTiming:
    """How long steps take. They end at multiples of `step_s` on the machine's monotonic clock, so that the receiver of
    a token in another process can compute the token's age."""

    step_s: float = 0.01
    """Seconds of a step that only decodes, whatever the batch; 0: as fast as possible."""
    prefill_rate: float = 0.0
    """Prompt tokens computed per second, on top of the step; 0: any number."""

    def end(self, began: float, prefill_tokens: int) -> float:
        """When a step with `prefill_tokens` prompt tokens ends."""
        computed = began + (prefill_tokens / self.prefill_rate if self.prefill_rate else 0.0)
        return (math.floor(computed / self.step_s) + 1) * self.step_s if self.step_s else computed


@dataclass(slots=True)
class PacedStep:
    """A launched step: what it draws, and when it ends."""

    result: StepResult
    ends: float
    undrawn: Rows | None = None
    """The rows of a step whose tokens are drawn when its masks arrive."""


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

    def __init__(
        self, vocab_size: int, end_tokens: Collection[int], slots: int, timing: PacedTiming, acceptance: float = 0.0
    ) -> None:
        """slots: most sequences in the batch. acceptance: how often its own guesses are right."""
        self._acceptance = acceptance
        self.timing = timing
        self._vocab_size, self._end_tokens = vocab_size, list(end_tokens)
        self._vocabulary = [token for token in range(vocab_size) if token not in end_tokens]
        self._logprob = -math.log(len(self._vocabulary))
        self._slots = [_Slot(0, 0, 0, 0, -1)] * slots
        self._masked: set[int] = set()
        """Slots whose tokens are drawn under masks."""

    def launch(self, words: Words) -> PacedStep:
        """Draw the step's tokens; its time begins now."""
        began = time.monotonic()
        edits, rows = unpack(words)
        asked: dict[int, list[int]] = {}
        for edit, slot, data in edits:
            if edit is Edit.ADMIT:
                self._admit(slot, SlotState.read(data))
            elif edit is Edit.MASK:
                self._masked.add(slot)
            elif edit is Edit.SCORE:
                asked[slot] = data.tolist()
        scores = self._score(ScoredRows.of(asked, rows)) if asked else NO_SCORES
        ends = self.timing.end(began, _prompt_tokens(rows) if self.timing.prefill_rate else 0)
        if self._masked and any(
            samples and slot in self._masked for slot, samples in zip(rows.slots, rows.samples, strict=True)
        ):
            return PacedStep(StepResult([], NOTHING_SAMPLED, scores), ends, rows)
        return PacedStep(StepResult([True] * len(rows.slots), self._sample(rows), scores), ends)

    def draw(self, step: PacedStep, masks: Masks) -> None:
        """Draw the step's tokens, those of slots with masks from the tokens that their masks allow."""
        assert step.undrawn is not None, "the step has no rows with masks, or its tokens were drawn"
        sampled = self._sample(step.undrawn, masks)
        step.result = StepResult([True] * len(step.undrawn.slots), sampled, step.result.scores)
        step.undrawn = None

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
        self._masked.discard(slot)
        self._slots[slot] = _Slot(seed, state.sample_index, state.prompt_len, state.computed, state.logprobs)

    def _sample(self, rows: Rows, masks: Masks | None = None) -> Sampled:
        tokens: list[list[int]] = []
        most = -1
        slots, end, line = self._slots, 0, 0
        for number, length, samples in zip(rows.slots, rows.lengths, rows.samples, strict=True):
            slot = slots[number]
            end += length
            slot.computed += length
            if not samples:
                continue
            position = slot.computed - slot.prompt_len
            own = None
            if masks is not None and number in self._masked:
                own = masks[line : line + samples]
                line += samples
            guesses = rows.ids[end - samples + 1 : end].tolist() if samples > 1 else []
            tokens.append(self._draw_along(slot, position - len(guesses), guesses, own))
            slot.computed += len(tokens[-1]) - samples
            if slot.logprobs > most:
                most = slot.logprobs
        if most < 0:
            return Sampled(tokens, None, None)
        asked = [slots[number].logprobs for number, samples in zip(rows.slots, rows.samples, strict=True) if samples]
        likely: Top = [(token, self._logprob) for token in self._vocabulary[:most]]
        logprobs = [[self._logprob] * len(drawn) for drawn in tokens]
        tops = [[likely[: max(count, 0)]] * len(drawn) for count, drawn in zip(asked, tokens, strict=True)]
        return Sampled(tokens, logprobs, tops)

    def _score(self, scored: ScoredRows) -> Mapping[int, Scores]:
        likely, lines = self._vocabulary[: scored.most], len(scored.lines)
        logprobs = [[self._logprob] * len(likely)] * lines
        return scored.divide([self._logprob] * lines, [likely] * lines, logprobs)

    def _draw_along(self, slot: _Slot, first: int, guesses: list[int], masks: Masks | None) -> list[int]:
        """The tokens from a position of the answer on, up to the first that is not what was guessed."""
        drawn = [self._draw_under(masks, 0, slot, first)]
        for place, guess in enumerate(guesses, 1):
            if guess == OWN_GUESS and self._is_right(slot, first + place):
                guess = drawn[-1]
            if drawn[-1] != guess:
                break
            drawn.append(self._draw_under(masks, place, slot, first + place))
        return drawn

    def _is_right(self, slot: _Slot, position: int) -> bool:
        """Whether its own guess for the token before this position is right."""
        name = f"{slot.seed}/{slot.sample_index}/{position}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little") < self._acceptance * 2**32

    def _draw_under(self, masks: Masks | None, line: int, slot: _Slot, position: int) -> int:
        """The token at a position of an answer, of those that a line of masks allows; an end token if it allows no
        other."""
        if masks is None:
            return self._draw(slot, position)
        allowed = np.flatnonzero(np.unpackbits(masks[line].view(np.uint8), bitorder="little")[: self._vocab_size])
        inner = allowed[~np.isin(allowed, self._end_tokens)]
        chosen: npt.NDArray[np.intp] = inner if len(inner) else allowed
        return int(chosen[self._draw(slot, position) % len(chosen)])

    def _draw(self, slot: _Slot, position: int) -> int:
        """The token at a position of the answer. The tokens of a run are drawn together."""
        run, place = divmod(position, _RUN)
        if slot.run != run:
            slot.run, slot.drawn = run, tokens_of(slot.seed, slot.sample_index, run, self._vocabulary)
        return slot.drawn[place]


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


def _prompt_tokens(rows: Rows) -> int:
    """Tokens of the rows that are neither an answer's last one nor guesses."""
    ids: list[int] = rows.ids.tolist()
    return len(ids) - ids.count(LAST_TOKEN) - sum(samples - 1 for samples in rows.samples if samples)


def tokens_of(seed: int, sample_index: int, run: int, vocabulary: list[int]) -> list[int]:
    """The tokens at positions `run * 8` to `run * 8 + 7` of the answer that these determine."""
    name = seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little") + run.to_bytes(4, "little")
    digest = hashlib.blake2b(name, digest_size=4 * _RUN).digest()
    return [vocabulary[number % len(vocabulary)] for number in _NUMBERS.unpack(digest)]
