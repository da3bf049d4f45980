"""Measures how far candidates are from their base, by token and by layer. Knows logits and streams, no files.

Legend: T tokens of a window, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.progress import Progress
from verify.served import Served, Steps

ANSWER_TOKENS = 48
PROMPT_TOKENS = 24
PARTS = ("queries", "keys", "attention", "mlp")


@dataclass(slots=True)
class Fit:
    """Ratio of norms and angle between numbers a and b, accumulated."""

    ab: float = 0.0
    aa: float = 0.0
    bb: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Accumulate more numbers."""
        a, b = a.double(), b.double()
        self.ab += float((a * b).sum())
        self.aa += float((a * a).sum())
        self.bb += float((b * b).sum())

    @property
    def ratio(self) -> float:
        """|b| / |a|."""
        return float((self.bb / self.aa) ** 0.5)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between a and b."""
        return float(self.ab / max((self.aa * self.bb) ** 0.5, 1e-30))

    @property
    def gain_error(self) -> float:
        """Deviation of the ratio of norms from 1 beyond what rounding with this angle explains: see `verify.gates`."""
        return max(0.0, abs(self.ratio - 1) - (1 - self.cosine**2) / 2)


@dataclass(slots=True)
class Tally:
    """Figures of one candidate by token and layer."""

    losses: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    cosines: list[Tensor] = field(default_factory=list)
    """Cosines of final hidden states; empty if the widths differ."""
    same_top: list[Tensor] = field(default_factory=list)
    accepted: list[Tensor] = field(default_factory=list)
    """Probability that the base accepts a draft of the candidate at temperature 1: sum of min(p, q)."""
    parts: list[dict[str, Fit]] = field(default_factory=list)
    """For each layer; empty if the candidate's layers have other shapes than the base's."""
    head: Fit = field(default_factory=Fit)
    """Logits computed from the base's residual stream; only if the layers have the base's shapes."""
    same_greedy: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)


def compare(
    base: Served, candidates: Sequence[Served], windows_WT: Tensor, answers: int, progress: Progress
) -> tuple[Tally, list[Tally]]:
    """Run all models on the windows; continue the beginnings of the first `answers` windows greedily."""
    own, tallies = Tally(), [Tally() for _ in candidates]
    for tally, candidate in zip(tallies, candidates, strict=True):
        if _layers(candidate) == _layers(base):
            tally.parts = [{part: Fit() for part in PARTS} for _ in base.model.layers]
    for done, ids_T in enumerate(windows_WT):
        progress("windows", done, len(windows_WT))
        _window(base, own, list(zip(candidates, tallies, strict=True)), ids_T)
    progress("windows", len(windows_WT), len(windows_WT))
    for done, ids_T in enumerate(windows_WT[:answers]):
        progress("answers", done, answers)
        prompt = ids_T[:PROMPT_TOKENS]
        wanted, seconds = base.continue_greedily(prompt, ANSWER_TOKENS)
        own.token_s.append(seconds)
        for candidate, tally in zip(candidates, tallies, strict=True):
            answer, seconds = candidate.continue_greedily(prompt, ANSWER_TOKENS)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, wanted, strict=True)))
            tally.token_s.append(seconds)
            tally.same_greedy.append(same / ANSWER_TOKENS)
    progress("answers", answers, answers)
    return own, tallies


def _window(base: Served, own: Tally, others: Sequence[tuple[Served, Tally]], ids_T: Tensor) -> None:
    ids_T = ids_T.to(base.device)
    x, states = base.read(ids_T)
    hidden, logits_TV = base.hidden(x), base.logits(x[:-1])
    logprobs_TV = F.log_softmax(logits_TV, -1)
    own.losses.append(F.nll_loss(logprobs_TV, ids_T[1:], reduction="none").cpu())
    steps = list(base.layer_steps(ids_T, states))
    for candidate, tally in others:
        its_x, _ = candidate.read(ids_T)
        its_hidden, its_logprobs_TV = candidate.hidden(its_x), candidate.logprobs(its_x[:-1])
        tally.losses.append(F.nll_loss(its_logprobs_TV, ids_T[1:], reduction="none").cpu())
        divergence_TV = F.kl_div(its_logprobs_TV, logprobs_TV, log_target=True, reduction="none")
        tally.divergences.append(divergence_TV.sum(-1).cpu())
        tally.same_top.append((its_logprobs_TV.argmax(-1) == logprobs_TV.argmax(-1)).float().cpu())
        tally.accepted.append(torch.minimum(its_logprobs_TV, logprobs_TV).exp().sum(-1).cpu())
        if its_hidden.shape == hidden.shape:
            tally.cosines.append(F.cosine_similarity(its_hidden.float(), hidden.float(), dim=-1).cpu())
        if tally.parts:
            _layer_fits(tally, steps, candidate, ids_T, states)
            tally.head.add(logits_TV, candidate.logits(x[:-1]))


def _layer_fits(tally: Tally, steps: list[Steps], candidate: Served, ids_T: Tensor, states: list[Tensor]) -> None:
    """Compare each layer separately, on the base's residual stream, so that errors of earlier layers do not add up."""
    for fits, wanted, got in zip(tally.parts, steps, candidate.layer_steps(ids_T, states), strict=True):
        for part, fit in fits.items():
            fit.add(getattr(wanted, part), getattr(got, part))


def _layers(model: Served) -> tuple[int, ...]:
    config = model.config
    return config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts."""
    return torch.cat(list(parts)) if parts else torch.empty(0)
