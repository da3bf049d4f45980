"""A result as one HTML file that needs nothing else: plots, tables and the JSON itself. Knows no network."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from bench.load import plot
from bench.load.plot import Axis, Line
from bench.load.tally import LATENCIES
from bench.load.terminal import LATENCIES as LATENCY_WORDS
from bench.load.terminal import facts, headline, profile_rows

_STYLE = """
:root { color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #f8fafc; }
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 0 0 .6rem; }
header p { color: #6b7280; margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.tile { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: .6rem 1rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; } .tile span { color: #6b7280; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
.card { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: 1rem; overflow-x: auto; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #6b7280; }
svg .grid { stroke: #e5e7eb; } svg polyline { stroke-width: 2; stroke-linejoin: round; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #f1f5f9; }
th:first-child, td:first-child { text-align: left; } th { color: #6b7280; font-weight: 500; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0 0; color: #6b7280; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .35em; }
"""
_TILES = (
    ("request_throughput", "requests/s", 2),
    ("request_goodput", "good requests/s", 2),
    ("output_throughput", "output tokens/s", 1),
    ("total_token_throughput", "total tokens/s", 1),
    ("median_ttft_ms", "median TTFT, ms", 2),
    ("p99_ttft_ms", "p99 TTFT, ms", 2),
    ("median_tpot_ms", "median TPOT, ms", 2),
    ("p99_itl_ms", "p99 ITL, ms", 2),
)
_COLUMNS = ("mean", "p25", "median", "p75", "p90", "p95", "p99", "max")


def page(result: dict[str, Any]) -> str:
    """The whole document."""
    title = f"weft bench: {result['model']['name']}"
    data = json.dumps(result).replace("</", "<\\/")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<header><h1>{escape(title)}</h1><p>{escape(headline(result))}</p></header>"
        f"{_tiles(result)}"
        f'<div class="cards">{"".join(_cards(result))}</div>'
        f'<script type="application/json" id="result">{data}</script></body></html>\n'
    )


def _tiles(result: dict[str, Any]) -> str:
    tiles = (
        f'<div class="tile"><b data-figure="{name}">{result[name]:,.{digits}f}</b><span>{escape(words)}</span></div>'
        for name, words, digits in _TILES
        if name in result
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _cards(result: dict[str, Any]) -> Iterable[str]:
    for name, words in LATENCY_WORDS:
        curve = [(value, share * 100) for value, share in result["curves"][name]]
        svg = plot.lines([Line(name, curve)], Axis("ms", log=True), Axis("% of all up to this"))
        yield _card(f"{words.capitalize()} ({name.upper()})", svg)
    seconds = result["timeline"]
    for title, names in (("Tokens per second", ["tokens"]), ("Requests", ["running", "started", "ended"])):
        series = [Line(name, [(line["second"], line[name]) for line in seconds]) for name in names]
        yield _card(title, plot.lines(series, Axis("seconds"), Axis("in each second")))
    hops = result["receipts"]["hops"]
    shares = [(hop, float(values["mean_ms"])) for hop, values in hops.items()]
    yield _card("Where the time of an answer went (mean)", plot.bar(shares, "ms"))
    if "profile" in result:
        told = result["profile"]
        shares = [(name, seconds / told["steps"] * 1e3) for name, seconds in told["host"].items()]
        table = _table(["", "ms a step", "share"], profile_rows(told))
        yield _card(f"{told['steps']} steps of {told['worker']}", plot.bar(shares, "ms") + table)
    rows = [
        [name.upper(), *(f"{result[f'{column}_{name}_ms']:,.2f}" for column in _COLUMNS)] for name in LATENCIES
    ]  # fmt: skip
    yield _card("Latencies, ms", _table(["", *_COLUMNS], rows))
    yield _card("Tokens and troubles", _table([], [[line] for line in facts(result)]))
    yield _card("Settings", _table([], _pairs(result["settings"])))
    yield _card("Machine", _table([], _pairs(result["machine"])))


def _pairs(values: dict[str, Any]) -> list[list[str]]:
    return [[name.replace("_", " "), str(value)] for name, value in values.items() if value not in (None, "", {})]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'
