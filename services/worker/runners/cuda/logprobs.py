"""Likely tokens that rows of a step ask for, copied from the GPU to the host. Knows rows, never slots.

All memory is allocated before the step is launched: a step that failed after its tokens were drawn could not be
launched again, because its slots would have advanced.
"""

import torch
from torch import Tensor

from kernels.sampling.top_logprobs import top_buffers, top_logprobs
from services.worker.runners.base import Top


class TopLogprobs:
    """The likely tokens of a step's S rows that sample: as many as the row that asks for most of them."""

    def __init__(self, asked: list[int], vocab_size: int, device: torch.device) -> None:
        """asked [S]: likely tokens that each row asks for; -1: not even its own token's log-probability."""
        self._asked = asked
        most = max(asked, default=-1)
        self.wanted = most >= 0
        """Whether any row asks for log-probabilities."""
        self._buffers = top_buffers(len(asked), vocab_size, most, device) if most > 0 else None
        found = (self._buffers.ids, self._buffers.best) if self._buffers else ()
        pinned = device.type == "cuda"
        self._host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in found]

    def send(self, logits_SV: Tensor, totals_S: Tensor) -> None:
        """Find them after what is in the stream and copy them to the host. Lines beyond the rows' are padding."""
        if self._buffers is None:
            return
        count = len(self._asked)
        top_logprobs(logits_SV[:count], totals_S[:count], self._buffers)
        for host, found in zip(self._host, (self._buffers.ids, self._buffers.best), strict=True):
            host.copy_(found, non_blocking=True)

    def lists(self) -> list[list[Top]] | None:
        """For each row the likely tokens at the one token that it drew, once the step is over; None if no row asks."""
        if not self._host:
            return [[[]] for _ in self._asked] if self.wanted else None
        ids, values = (host.tolist() for host in self._host)
        return [
            [list(zip(row_ids[:count], row_values[:count], strict=True)) if count > 0 else []]
            for row_ids, row_values, count in zip(ids, values, self._asked, strict=True)
        ]
