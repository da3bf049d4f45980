"""From logits to tokens: the sampling state of each slot, and the order of operations. Knows slots, never jobs."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference import sampling
from services.worker.runners.base import Sampled, Top
from services.worker.runners.forbidden import Forbidden
from services.worker.runners.step import Edit, SlotState, Words

_DRAW, _CUT, _PENALTY, _BIAS, _BAN, _LOGPROBS, _FORBID = (1 << bit for bit in range(7))


class Sampler:
    """logits -> repetition, then presence and frequency penalty, bias, ban, temperature, top_k, top_p, min_p -> draw.

    Log-probabilities are the model's own: of the logits before all that. The logits of tokens that a mask forbids are
    minus infinity already.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.slots, self.vocab_size = slots, vocab_size
        self._todo = np.zeros(slots, np.int64)
        self._logprobs = np.zeros(slots, np.int64)
        self._prompt_len = np.zeros(slots, np.int64)
        self._seed = torch.zeros(slots, dtype=torch.int64)
        self._sample_index = torch.zeros(slots, dtype=torch.int64)
        self._top_k = torch.zeros(slots, dtype=torch.int64)
        self._temperature, self._top_p, self._min_p = (torch.zeros(slots) for _ in range(3))
        self._repetition, self._presence, self._frequency = (torch.zeros(slots) for _ in range(3))
        self._seen: Tensor | None = None  # bool [slots, V], made for the first job with penalties
        self._counts: Tensor | None = None  # float [slots, V]
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._bans: dict[int, tuple[int, Tensor]] = {}
        self._forbidden: dict[int, Forbidden] = {}

    # ---- edits ----

    def edit(self, edit: Edit, slot: int, words: Words) -> None:
        """Apply an edit of a packed step that sets how the slot's tokens are drawn: any but ADMIT and MASK."""
        if edit is Edit.HISTORY:
            self.remember(slot, int(words[0]), words[1:])
        elif edit is Edit.BIAS:
            ids, values = np.split(words, 2)
            self.bias(slot, ids, values.view(np.float32))
        elif edit is Edit.BAN:
            self.ban(slot, int(words[0]), words[1:])
        else:
            assert edit is Edit.FORBID, f"{edit.name} is no edit of a sampler"
            self.forbid(slot, words)

    def admit(self, slot: int, state: SlotState) -> None:
        """A sequence takes the slot; the state of the previous one is dropped."""
        self._prompt_len[slot] = state.prompt_len
        self._logprobs[slot] = state.logprobs
        self._seed[slot] = state.seed_low & 0xFFFFFFFF | state.seed_high << 32
        self._sample_index[slot] = state.sample_index
        self._top_k[slot] = state.top_k
        self._temperature[slot] = state.temperature
        self._top_p[slot] = state.top_p
        self._min_p[slot] = state.min_p
        self._repetition[slot] = state.repetition_penalty
        self._presence[slot] = state.presence_penalty
        self._frequency[slot] = state.frequency_penalty
        cuts = state.top_k > 0 or state.top_p < 1 or state.min_p > 0
        draws = state.temperature > 0
        self._todo[slot] = _DRAW * draws | _CUT * (draws and cuts) | _LOGPROBS * (state.logprobs >= 0)

    def remember(self, slot: int, prompt_len: int, ids: Words) -> None:
        """Set the tokens that the slot's penalties count: the prompt's and the answer's."""
        if self._seen is None or self._counts is None:
            self._seen = torch.zeros(self.slots, self.vocab_size, dtype=torch.bool)
            self._counts = torch.zeros(self.slots, self.vocab_size)
        tokens = torch.from_numpy(ids.astype(np.int64))
        self._seen[slot].zero_()[tokens] = True
        self._counts[slot] = torch.bincount(tokens[prompt_len:], minlength=self.vocab_size)
        self._todo[slot] |= _PENALTY

    def bias(self, slot: int, ids: Words, values: npt.NDArray[np.float32]) -> None:
        """Set what is added to these tokens' logits."""
        self._bias[slot] = (torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(values.copy()))
        self._todo[slot] |= _BIAS

    def ban(self, slot: int, until: int, ids: Words) -> None:
        """Forbid these tokens before this position of the answer."""
        self._bans[slot] = (until, torch.from_numpy(ids.astype(np.int64)))
        self._todo[slot] |= _BAN

    def forbid(self, slot: int, words: Words) -> None:
        """Set the bad words of the slot."""
        self._forbidden[slot] = Forbidden(words)
        self._todo[slot] |= _FORBID

    # ---- sampling ----

    def sample(self, logits: Tensor, slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Sampled:
        """Draw a token for each row. logits float32 [S, V]; lengths [S]: tokens before the new one."""
        todo = self._todo[slots]
        if not todo.any():
            return Sampled(sampling.choose(logits)[:, None].tolist(), None, None)
        chosen = self.guess(logits, slots, lengths)
        sampled = self._report(logits, chosen, slots, todo)
        counted = np.flatnonzero(todo & _PENALTY)
        if self._seen is not None and self._counts is not None and len(counted):
            tokens, where = chosen[torch.from_numpy(counted)], torch.from_numpy(slots[counted])
            self._seen[where, tokens] = True
            self._counts[where, tokens] += 1
        for row in np.flatnonzero(todo & _FORBID).tolist():
            slot = int(slots[row])
            self._forbidden[slot].add(int(lengths[row] - self._prompt_len[slot]), int(chosen[row]))
        return sampled

    def guess(self, logits: Tensor, slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Tensor:
        """What `sample` draws, int64 [S]; nothing is counted."""
        todo = self._todo[slots]
        positions = lengths - self._prompt_len[slots]
        shaped = self._shape(logits, slots, positions, todo)
        chosen = sampling.choose(shaped)
        draws = np.flatnonzero(todo & _DRAW)
        if len(draws):
            rows = torch.from_numpy(draws)
            chosen[rows] = self._draw(shaped[rows], slots[draws], positions[draws], todo[draws])
        return chosen

    def _shape(
        self,
        logits: Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        todo: npt.NDArray[np.int64],
    ) -> Tensor:
        """Apply penalties, bias and bans, on a copy if there are any."""
        if not (todo & (_PENALTY | _BIAS | _BAN | _FORBID)).any():
            return logits
        logits = logits.clone()
        penal = np.flatnonzero(todo & _PENALTY)
        if self._seen is not None and self._counts is not None and len(penal):
            rows, where = torch.from_numpy(penal), torch.from_numpy(slots[penal])
            part = sampling.repeat_penalty(logits[rows], self._seen[where], self._repetition[where])
            logits[rows] = sampling.count_penalties(
                part, self._counts[where], self._presence[where], self._frequency[where]
            )
        for row in np.flatnonzero(todo & _BIAS).tolist():
            ids, values = self._bias[int(slots[row])]
            logits[row, ids] += values
        for row in np.flatnonzero(todo & _BAN).tolist():
            until, ids = self._bans[int(slots[row])]
            if positions[row] < until:
                logits[row, ids] = -torch.inf
        for row in np.flatnonzero(todo & _FORBID).tolist():
            logits[row, self._forbidden[int(slots[row])].banned(int(positions[row]))] = -torch.inf
        return logits

    def _draw(
        self,
        logits: Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        todo: npt.NDArray[np.int64],
    ) -> Tensor:
        """Draw one token for each row, keyed by seed, position and sample index. `logits` is a copy."""
        where = torch.from_numpy(slots)
        logits.div_(self._temperature[where, None])
        cut = np.flatnonzero(todo & _CUT)
        if len(cut):
            rows = torch.from_numpy(cut)
            logits[rows] = self._cut(logits[rows], where[rows])
        noise = sampling.gumbel_noise(
            self._seed[where], torch.from_numpy(positions), self._sample_index[where], self.vocab_size
        )
        return sampling.choose(logits, noise)

    def _cut(self, logits: Tensor, where: Tensor) -> Tensor:
        top_k, top_p, min_p = self._top_k[where], self._top_p[where], self._min_p[where]
        if bool((top_k > 0).any()):
            sampling.keep_top_k(logits, top_k)
        nucleus = torch.nonzero(top_p < 1)[:, 0]  # a sum of roundings may reach 1 too early
        if len(nucleus):
            logits[nucleus] = sampling.keep_top_p(logits[nucleus], top_p[nucleus])
        return sampling.keep_min_p(logits, min_p) if bool((min_p > 0).any()) else logits

    def _report(
        self, logits: Tensor, chosen: Tensor, slots: npt.NDArray[np.int64], todo: npt.NDArray[np.int64]
    ) -> Sampled:
        asked = np.flatnonzero(todo & _LOGPROBS)
        if not len(asked):
            return Sampled(chosen[:, None].tolist(), None, None)
        rows, counts = torch.from_numpy(asked), self._logprobs[slots[asked]]
        own, best_ids, best = sampling.log_probs(logits[rows], chosen[rows], int(counts.max()))
        logprobs = [[float("nan")] for _ in slots]
        tops: list[list[Top]] = [[[]] for _ in slots]
        columns = zip(asked.tolist(), counts.tolist(), own.tolist(), best_ids.tolist(), best.tolist(), strict=True)
        for row, count, value, ids, values in columns:
            logprobs[row] = [value]
            tops[row] = [list(zip(ids[:count], values[:count], strict=True))]
        return Sampled(chosen[:, None].tolist(), logprobs, tops)
