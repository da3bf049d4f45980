"""Renders a result of `weft bench` as one HTML page: its plots and tables. Knows no network."""

from collections.abc import Iterable
from typing import Any

from report import html, plot
from report.plot import Axis, Line
from weft.load.tally import LATENCIES
from weft.load.terminal import LATENCIES as LATENCY_WORDS
from weft.load.terminal import facts, headline, profile_rows

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
    figures = ((name, f"{result[name]:,.{digits}f}", words) for name, words, digits in _TILES if name in result)
    body = (html.tiles(figures), html.cards(_cards(result)))
    return html.document(f"weft bench: {result['model']['name']}", headline(result), body, result)


def _cards(result: dict[str, Any]) -> Iterable[str]:
    for name, words in LATENCY_WORDS:
        curve = [(value, share * 100) for value, share in result["curves"][name]]
        svg = plot.lines([Line(name, curve)], Axis("ms", log=True), Axis("% of all up to this"))
        yield html.card(f"{words.capitalize()} ({name.upper()})", svg)
    seconds = result["timeline"]
    for title, names in (("Tokens per second", ["tokens"]), ("Requests", ["running", "started", "ended"])):
        series = [Line(name, [(line["second"], line[name]) for line in seconds]) for name in names]
        yield html.card(title, plot.lines(series, Axis("seconds", whole=True), Axis("in each second")))
    hops = result["receipts"]["hops"]
    shares = [(hop, float(values["mean_ms"])) for hop, values in hops.items()]
    stages = [[hop, *(f"{values[name]:,.2f}" for name in ("mean_ms", "p99_ms"))] for hop, values in hops.items()]
    drawing = plot.bar(shares, "ms") + html.table(["stage, ms", "mean", "p99"], stages)
    yield html.card("Time of an answer by stage", drawing)
    if "profile" in result:
        profile = result["profile"]
        shares = [(name, seconds / profile["steps"] * 1e3) for name, seconds in profile["host"].items()]
        table = html.table(["", "ms a step", "share"], profile_rows(profile))
        yield html.card(f"{profile['steps']} steps of {profile['worker']}", plot.bar(shares, "ms") + table)
    yield html.card("Tokens and errors", html.facts(facts(result)), wide="profile" in result)
    rows = [[name.upper(), *(f"{result[f'{column}_{name}_ms']:,.2f}" for column in _COLUMNS)] for name in LATENCIES]
    yield html.card("Latencies, ms", html.table(["", *_COLUMNS], rows), wide=True)
    yield html.card("Settings", html.table([], html.pairs(result["settings"])))
    yield html.card("Machine", html.table([], html.pairs(result["machine"])))
