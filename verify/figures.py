"""How figures are written, in the terminal and on the page."""

from collections.abc import Mapping
from typing import Any

ROWS = (
    ("perplexity", "perplexity", "{:.3f}"),
    ("perplexity_ratio", "  over the base's", "{:.4f}"),
    ("cosine", "cosine of final hidden states, mean", "{:.5f}"),
    ("cosine_worst", "  worst token", "{:.5f}"),
    ("kl", "KL from the base, nats a token, mean", "{:.5f}"),
    ("kl_p99", "  99th percentile", "{:.5f}"),
    ("top1", "same likeliest token", "{:.1%}"),
    ("accepted", "drafts that the base accepts", "{:.1%}"),
    ("greedy", "greedy answers, share before they part", "{:.1%}"),
    ("gain_error", "largest gain error of a part", "{:.4f}"),
    ("row_error", "worst row of a weight, over the median row", "{:.2f}"),
    ("row_gain_error", "largest gain error of a row", "{:.4f}"),
    ("file_bytes", "bytes on disk", "{:,.0f}"),
    ("file_ratio", "  of the base's", "{:.1%}"),
    ("memory_bytes", "bytes of weights in memory", "{:,.0f}"),
    ("memory_ratio", "  of the base's", "{:.1%}"),
    ("tokens_per_second", "tokens/s, one greedy answer", "{:,.0f}"),
)


def cell(told: Mapping[str, Any], name: str, form: str) -> str:
    """A figure as written; empty where there is none."""
    value = told.get(name)
    return "" if value is None else form.format(value)


def number(value: float | None) -> str:
    """A figure in a sentence."""
    return "not known" if value is None else f"{value:.5g}"
