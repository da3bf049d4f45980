"""Log-probabilities that rows of a step ask for, on their way from the GPU. Knows rows, never slots.

All memory is taken before the step goes into the stream: a step that failed after its tokens were drawn could not be
told again, for its slots would have advanced.
"""

import torch
from torch import Tensor

from kernels.sampling.top_logprobs import top_buffers, top_logprobs


class TopLogprobs:
    """The likely tokens of a step's rows that sample: as many as the row that asks for most, if any does."""

    def __init__(self, asked: list[int], vocab_size: int, device: torch.device) -> None:
        """asked [S]: likely tokens that each row asks for; -1: none, nor its own token's log-probability."""
        self._asked = asked
        most = max(asked, default=-1)
        self.wanted = most >= 0
        """Whether any row asks for log-probabilities."""
        self._room = top_buffers(len(asked), vocab_size, most, device) if most > 0 else None
        found = (self._room.ids, self._room.best) if self._room else ()
        pinned = device.type == "cuda"
        self._told = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in found]

    def send(self, logits_SV: Tensor, totals_S: Tensor) -> None:
        """Find them behind what is in the stream and send them to the host. Lines beyond the rows' are nobody's."""
        if self._room is None:
            return
        count = len(self._asked)
        top_logprobs(logits_SV[:count], totals_S[:count], self._room)
        for told, found in zip(self._told, (self._room.ids, self._room.best), strict=True):
            told.copy_(found, non_blocking=True)

    def lists(self) -> list[list[tuple[int, float]]] | None:
        """Ids and log-probabilities of each row, once the step is over; None if nobody asks for any."""
        if not self._told:
            return [[] for _ in self._asked] if self.wanted else None
        ids, values = (told.tolist() for told in self._told)
        return [
            list(zip(row_ids[:count], row_values[:count], strict=True)) if count > 0 else []
            for row_ids, row_values, count in zip(ids, values, self._asked, strict=True)
        ]
