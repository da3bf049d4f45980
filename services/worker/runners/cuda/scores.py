"""Log-probabilities of prompts on the GPU: computed beside a step's draws, copied to the host with its report.

All memory is allocated, and all is computed, before the step draws: see `logprobs`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.sampling.top_logprobs import top_buffers, top_logprobs
from services.worker.models.decoder import Decoder
from services.worker.runners.base import Scores
from services.worker.runners.scored_rows import ScoredRows

_LINES = 64
"""Lines whose logits are in memory together."""


class PromptLines:
    """The E lines of one step."""

    def __init__(self, scored: ScoredRows, device: torch.device) -> None:
        self._scored = scored
        pinned = device.type == "cuda"
        count, most = len(scored.lines), scored.most
        sent = torch.tensor([scored.lines, scored.targets], dtype=torch.int64)
        self._sent = sent.pin_memory().to(device, non_blocking=True) if pinned else sent
        self._logprobs = torch.empty(count, dtype=torch.float32, device=device)
        self._ids = torch.empty(count, most, dtype=torch.int64, device=device)
        self._values = torch.empty(count, most, dtype=torch.float32, device=device)
        found = (self._logprobs, self._ids, self._values)
        self._host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in found]

    @property
    def lines(self) -> Tensor:
        """int64 [E]: indices among the step's tokens."""
        return self._sent[0]

    def score(self, model: Decoder, x: Tensor) -> None:
        """x [E, hidden]: the residual stream of the lines."""
        targets = self._sent[1]
        for start in range(0, len(x), _LINES):
            here = slice(start, start + _LINES)
            logits = model.logits(x[here])
            totals = torch.logsumexp(logits.float(), 1)
            self._logprobs[here] = logits.gather(1, targets[here, None])[:, 0].float() - totals
            if self._scored.most:
                buffers = top_buffers(len(logits), logits.shape[1], self._scored.most, x.device)
                top_logprobs(logits, totals, buffers)
                self._ids[here], self._values[here] = buffers.ids, buffers.best
        for host, found in zip(self._host, (self._logprobs, self._ids, self._values), strict=True):
            host.copy_(found, non_blocking=True)

    def results(self) -> Mapping[int, Scores]:
        """By row, once the step is over."""
        logprobs, ids, values = (host.tolist() for host in self._host)
        return self._scored.divide(logprobs, ids, values)
