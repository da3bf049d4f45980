"""The sampling state of each slot on the device, edited in place. Knows settings and positions, never logits.

`kernels.sampling` reads this state while a step runs; edits come between steps, in the order of the stream.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sampling.slot_settings import slot_settings
from services.worker.runners.cuda.bad_words import BadWords
from services.worker.runners.step import SlotState, Words


class GpuSampler:
    """The same state as `runners.cpu.sampler` keeps, for `slots` slots and one more for padding, which is greedy."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.device, self.vocab_size = device, vocab_size
        self.settings = slot_settings(slots + 1, device, vocab_size)
        self._prompt_len = np.zeros(slots + 1, np.int64)
        self.logprobs = [-1] * (slots + 1)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._bans: dict[int, tuple[int, Tensor]] = {}
        """For each slot: the number of tokens from which its ban ends, and the banned tokens."""
        self._bad_words: dict[int, BadWords] = {}
        self.masked: frozenset[int] = frozenset()
        """Slots that draw under masks."""

    # ---- edits ----

    def admit(self, slot: int, state: SlotState) -> None:
        """A sequence takes the slot; the previous one's state is dropped. `kernels.slot_edits` writes the state that is
        on the device."""
        self._prompt_len[slot] = state.prompt_len
        self.logprobs[slot] = state.logprobs
        self._bias.pop(slot, None)
        self._bans.pop(slot, None)
        self._bad_words.pop(slot, None)
        self.masked -= {slot}

    def release(self, slot: int) -> None:
        """The slot is empty: a step has nothing to do for its bad words and masks any more."""
        self._bad_words.pop(slot, None)
        self.masked -= {slot}

    def mask(self, slot: int) -> None:
        """The slot draws under masks."""
        self.masked |= {slot}

    def position(self, slot: int, context: int) -> int:
        """Position in its answer of the token that follows `context` tokens of the slot."""
        return context - int(self._prompt_len[slot])

    def remember(self, slot: int, prompt_len: int, ids: Words) -> None:
        """Set the tokens that the slot's penalties count: the prompt's and the answer's."""
        assert self.settings.history is not None
        counts = np.bincount(ids[prompt_len:], minlength=self.vocab_size)[: self.vocab_size] * 2
        counts[np.unique(ids)] |= 1
        self.settings.history[slot] = self._sent(torch.from_numpy(counts.astype(np.int32)))

    def bias(self, slot: int, ids: Words, values: npt.NDArray[np.float32]) -> None:
        """Set what is added to these tokens' logits."""
        self._bias[slot] = (
            self._sent(torch.from_numpy(ids.astype(np.int64))), self._sent(torch.from_numpy(values.copy()))
        )  # fmt: skip
        self._write_edits(slot)

    def ban(self, slot: int, until: int, ids: Words) -> None:
        """Forbid these tokens before this position of the answer."""
        self._bans[slot] = (until + int(self._prompt_len[slot]), self._sent(torch.from_numpy(ids.astype(np.int64))))
        self._write_edits(slot)

    def forbid(self, slot: int, words: Words) -> None:
        """Set the bad words of the slot."""
        self._bad_words[slot] = BadWords(words, self.device)
        self._write_edits(slot)

    def mark_bad_words(self, slot: int, context: int, last_token: Tensor | None) -> None:
        """Before a step that draws this slot's token behind `context` tokens: ban what would complete a bad word.
        last_token int64 [1]: the token before it, if the device drew it."""
        bad_words = self._bad_words.get(slot)
        if bad_words is not None:
            assert self.settings.edits is not None
            bad_words.mark(self.settings.edits[slot], context - int(self._prompt_len[slot]), last_token)

    @property
    def has_bad_words(self) -> bool:
        """Whether any slot has bad words."""
        return bool(self._bad_words)

    def lift_bans(self, slots: list[int], contexts: list[int]) -> None:
        """Before a step: drop the bans that end at these slots' numbers of tokens."""
        if not self._bans:
            return
        for slot, context in zip(slots, contexts, strict=True):
            ban = self._bans.get(slot)
            if ban is not None and context >= ban[0]:
                del self._bans[slot]
                self._write_edits(slot)

    def _write_edits(self, slot: int) -> None:
        """Rewrite the slot's line: bias, then bans. Steps that read it come before or after this in the stream."""
        edits = self.settings.edits
        assert edits is not None
        line = edits[slot].zero_()
        if slot in self._bias:
            ids, values = self._bias[slot]
            line.index_copy_(0, ids, values)
        if slot in self._bans:
            line.index_fill_(0, self._bans[slot][1], -torch.inf)
        if slot in self._bad_words:
            self._bad_words[slot].rewritten(line)
        self.settings.edited[slot] = int(slot in self._bias or slot in self._bans or slot in self._bad_words)

    def _sent(self, values: Tensor) -> Tensor:
        """A copy on the device, without waiting for it."""
        if self.device.type == "cpu":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)
