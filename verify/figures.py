"""Names and number formats of the figures, for the terminal and the HTML page. Knows no model."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ROWS = (
    ("perplexity", "perplexity", "{:.3f}"),
    ("perplexity_ratio", "  relative to the base's", "{:.4f}"),
    ("cosine", "cosine of final hidden states, mean", "{:.5f}"),
    ("cosine_worst", "  worst token", "{:.5f}"),
    ("kl", "KL from the base, nats per token, mean", "{:.5f}"),
    ("kl_p99", "  99th percentile", "{:.5f}"),
    ("top1", "same most likely token", "{:.1%}"),
    ("accepted", "drafts that the base accepts", "{:.1%}"),
    ("greedy", "greedy answers, share before they differ", "{:.1%}"),
    ("gain_error", "largest gain error of a part", "{:.4f}"),
    ("row_error", "worst row of a weight, over the median row", "{:.2f}"),
    ("row_gain_error", "largest gain error of a row", "{:.4f}"),
    ("file_bytes", "bytes on disk", "{:,.0f}"),
    ("file_ratio", "  of the base's", "{:.1%}"),
    ("memory_bytes", "bytes of weights in memory", "{:,.0f}"),
    ("memory_ratio", "  of the base's", "{:.1%}"),
    ("tokens_per_second", "tokens/s, one greedy answer", "{:,.0f}"),
)


def cell(model: Mapping[str, Any], name: str, form: str) -> str:
    """A formatted figure; empty if there is none."""
    value = model.get(name)
    return "" if value is None else form.format(value)


def number(value: float | None) -> str:
    """A figure within a sentence."""
    return "not known" if value is None else f"{value:.5g}"


def draft_rows(drafts: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """For each draft and temperature: name, temperature, tokens a step, and how often a guess is right, by depth."""
    for draft in drafts:
        shares = (f"{share:.1%}" for share in draft["by_depth"])
        yield [draft["name"], f"{draft['temperature']:g}", f"{draft['accepted_length']:.2f}", *shares]
