"""Log-probabilities of prompts on the CPU: further lines of a step, and what they show. Knows rows, no slots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.reference.sampling import log_probs
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.runners.base import Scores
from services.worker.runners.scored_rows import ScoredRows
from services.worker.runners.step import Rows

_LINES = 256
"""Lines whose logits are in memory together."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The lines of one step."""

    scored: ScoredRows

    @classmethod
    def of(cls, asked: Mapping[int, Sequence[int]], rows: Rows) -> "Asked":
        """asked: the data of SCORE by slot."""
        return cls(ScoredRows.of(asked, rows))

    @property
    def count(self) -> int:
        """Number E of lines."""
        return len(self.scored.lines)

    def widen(self, step: StepTensors) -> StepTensors:
        """The step, whose last layer is also computed for these lines, behind those that are sampled from."""
        sampled = torch.arange(len(step.token_ids)) if step.sampled is None else step.sampled
        return replace(step, sampled=torch.cat([sampled, torch.tensor(self.scored.lines, dtype=torch.int64)]))

    def score(self, model: Decoder, x: Tensor) -> Mapping[int, Scores]:
        """x: the residual stream, whose last E lines are these. -> the results by row."""
        lines = x[len(x) - self.count :].split(_LINES)  # type: ignore[no-untyped-call]
        return score_logits(self.scored, (model.logits(part).float() for part in lines))


def score_logits(scored: ScoredRows, logits: Iterable[Tensor]) -> Mapping[int, Scores]:
    """logits: float32 [lines, V], which together are the E lines in their order. -> the results by row."""
    targets = torch.tensor(scored.targets, dtype=torch.int64)
    logprobs: list[float] = []
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for part in logits:
        own, best_ids, best = log_probs(part, targets[len(ids) : len(ids) + len(part)], scored.most)
        logprobs += own.tolist()
        ids += best_ids.tolist()
        values += best.tolist()
    return scored.divide(logprobs, ids, values)
