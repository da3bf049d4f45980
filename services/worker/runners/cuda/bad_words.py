"""The bad words of slots on the device: which tokens may not follow answers whose last token only the device knows.

Before a step, a slot's line of the edit table gets -inf at the tokens that would complete a bad word. Rows without bad
words cost nothing. Only operations whose sizes the host knows, so that nothing waits for the device.
"""

import torch
from torch import Tensor

from services.worker.runners.forbidden import Forbidden
from services.worker.runners.step import Words

_ANY, _NOTHING = -1, -2
"""Place before the beginning of a sequence, and before the beginning of an answer."""


class BadWords:
    """The bad words of one slot."""

    def __init__(self, words: Words, device: torch.device) -> None:
        forbidden = Forbidden(words)
        self._before = forbidden.before
        padded = [[_ANY] * (self._before + 1 - len(each)) + each for each in forbidden.sequences]
        sequences = torch.tensor(padded, dtype=torch.int64)
        position = int(words[0])
        recent = torch.full((max(self._before, 1),), _NOTHING, dtype=torch.int64)
        last = forbidden.last(position)
        for place, token in enumerate(last, position - len(last)):
            recent[place % len(recent)] = token
        self._prefixes = _sent(sequences[:, :-1].contiguous(), device)
        self._ends = _sent(sequences[:, -1].contiguous(), device)
        self._recent = _sent(recent, device)
        """The answer's last tokens, each at its position modulo the length."""
        self._allowed: Tensor | None = None
        """What the slot's line has at the ends of the sequences if no sequence matches."""

    def rewritten(self, line: Tensor) -> None:
        """The slot's line float32 [V] was written anew, without bad words."""
        self._allowed = line[self._ends]

    def mark(self, line: Tensor, position: int, last_token: Tensor | None) -> None:
        """Set the slot's line for the token at this position of the answer. last_token int64 [1]: the token before it,
        if the device drew it. Each position comes in turn; one may be repeated."""
        assert self._allowed is not None
        if last_token is not None and self._before:
            place = (position - 1) % self._before
            self._recent[place : place + 1] = last_token
        values = self._allowed
        if self._before:
            recent = torch.roll(self._recent, -(position % self._before))  # the oldest first
            hits = ((self._prefixes == recent) | (self._prefixes == _ANY)).all(1)
            values = torch.where(hits, -torch.inf, values)
        else:
            values = torch.full_like(values, -torch.inf)
        line.scatter_reduce_(0, self._ends, values, "amin", include_self=False)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
