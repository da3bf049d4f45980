"""Computes figures from measurements, and verdicts from figures. Knows no models.

A gate is a figure with a limit. A quantized model must pass all of these:

- `cosine`, `kl`, `perplexity_ratio`, `top1`: its outputs are nearly the base's. They detect any large damage.
- `gain_error`: no part has outputs that are too large or too small. The parts (of a layer queries, keys, and what
  attention and the MLP add; the head's logits) are computed on the base's residual stream, so errors do not add up.
  Let e^2 = 1 - cos^2, the share of a part's variance that is noise. Rounding to nearest adds noise and keeps the
  signal, so norms grow by a factor 1 + e^2 / 2. Rounding that minimizes the output error shrinks them by 1 - e^2 / 2.
  So the ratio of norms of an honest quantization, however coarse, deviates from 1 by about e^2 / 2. The gain error is
  the deviation beyond that and is near 0. A scale that is wrong by 5% gives 0.05, even if the outputs hardly change.

- `row_error`, `row_gain_error`: no row of a weight is damaged. One row of thousands hardly shows in the outputs, so the
  weights themselves are compared (`verify.rows`).

Pruned and distilled models are other networks: only `kl` and `perplexity_ratio` apply to them.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from verify.compare import PARTS, Tally, joined
from verify.rows import RowErrors
from verify.served import Served

_QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_COMPARE = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Gate:
    """A figure with a limit."""

    figure: str
    sign: str
    limit: float

    def holds(self, figures: Mapping[str, Any]) -> bool:
        """Whether a candidate passes; a candidate without this figure fails."""
        value = figures.get(self.figure)
        return value is not None and bool(_COMPARE[self.sign](value, self.limit))

    def __str__(self) -> str:
        return f"{self.figure.replace('_', ' ')} {self.sign} {self.limit:g}"


LIMITS: Mapping[str, Mapping[str, float]] = {
    "quantized": {
        "cosine": 0.99,
        "kl": 0.05,
        "perplexity_ratio": 1.05,
        "top1": 0.85,
        "gain_error": 0.015,
        "row_error": 5.0,
        "row_gain_error": 0.15,
    },
    "changed": {"kl": 1.0, "perplexity_ratio": 2.0},
}
"""Default limits by kind of candidate."""
_AT_LEAST = ("cosine", "top1")


def base_figures(model: Served, tally: Tally) -> dict[str, Any]:
    """Figures of a model itself, without a comparison."""
    return {
        "name": model.folder.resolve().name,
        "parameters": model.parameters,
        "file_bytes": model.file_bytes,
        "memory_bytes": model.memory_bytes,
        "perplexity": math.exp(joined(tally.losses).mean().item()),
        "tokens_per_second": 1 / min(tally.token_s) if tally.token_s else None,
    }


def figures(model: Served, tally: Tally, rows: RowErrors | None, base: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a candidate, for JSON."""
    own = base_figures(model, tally)
    kl, cosines = joined(tally.divergences), joined(tally.cosines)
    ratios = [{part: fits[part].ratio for part in PARTS} for fits in tally.parts]
    gain_errors = [fit.gain_error for fits in tally.parts for fit in fits.values()]
    gain_errors += [tally.head.gain_error] if tally.parts else []
    return own | {
        "perplexity_ratio": own["perplexity"] / base["perplexity"],
        "cosine": cosines.mean().item() if len(cosines) else None,
        "cosine_worst": cosines.min().item() if len(cosines) else None,
        "kl": kl.mean().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "kl_curve": _quantiles(kl),
        "top1": joined(tally.same_top).mean().item(),
        "accepted": joined(tally.accepted).mean().item(),
        "greedy": sum(tally.same_greedy) / len(tally.same_greedy) if tally.same_greedy else None,
        "gain_error": max(gain_errors, default=None),
        "row_error": rows.error if rows else None,
        "row_gain_error": rows.gain_error if rows else None,
        "worst_rows": [{**asdict(finding), "text": str(finding)} for finding in rows.worst] if rows else [],
        "ratios": ratios,
        "angles": [{part: fits[part].cosine for part in PARTS} for fits in tally.parts],
        "file_ratio": own["file_bytes"] / base["file_bytes"],
        "memory_ratio": own["memory_bytes"] / base["memory_bytes"],
    }


def apply_gates(values: Mapping[str, Any], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each gate with its value and whether the candidate passes it."""
    return [
        {"gate": str(gate), "figure": gate.figure, "value": values.get(gate.figure), "holds": gate.holds(values)}
        for gate in (Gate(name, ">=" if name in _AT_LEAST else "<=", limit) for name, limit in limits.items())
    ]


def _quantiles(values: Tensor) -> list[tuple[float, float]]:
    cut = torch.quantile(values, torch.tensor(_QUANTILES)).clamp_min(1e-7)
    return [(float(value), share * 100) for value, share in zip(cut, _QUANTILES, strict=True)]
