"""Builds one self-contained HTML document of tiles, cards, tables and the result as JSON. Knows no figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

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
.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #6b7280; }
svg .grid { stroke: #e5e7eb; } svg polyline { stroke-width: 2; stroke-linejoin: round; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #f1f5f9; }
th:first-child, td:first-child { text-align: left; white-space: pre-wrap; } th { color: #6b7280; font-weight: 500; }
.bad { color: #dc2626; font-weight: 600; } .good { color: #059669; }
.said { color: #6b7280; margin: 0 0 .6rem; font-size: .9rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0 0; color: #6b7280; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .35em; }
"""


def document(title: str, below: str, body: Iterable[str], result: Mapping[str, Any]) -> str:
    """The whole page, with `result` embedded as JSON for programs."""
    data = json.dumps(result).replace("</", "<\\/")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<header><h1>{escape(title)}</h1><p>{escape(below)}</p></header>{''.join(body)}"
        f'<script type="application/json" id="result">{data}</script></body></html>\n'
    )


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """The main figures: (name, formatted value, label). A value that begins with "!" is bad, with "+" good."""
    parts = (
        f'<div class="tile">{_marked("b", value, name)}<span>{escape(words)}</span></div>'
        for name, value, words in figures
    )
    return f'<div class="tiles">{"".join(parts)}</div>'


def cards(parts: Iterable[str]) -> str:
    """Cards side by side, as many as fit in a row."""
    return f'<div class="cards">{"".join(parts)}</div>'


def card(title: str, body: str, *, said: str = "", wide: bool = False) -> str:
    """A titled box with a note (`said`) under the title; a wide one takes a whole row."""
    words = f'<p class="said">{escape(said)}</p>' if said else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{words}{body}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text. A cell that begins with "!" is bad, with "+" good."""
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def pairs(values: Mapping[str, Any]) -> list[list[str]]:
    """A mapping as rows, without empty values."""
    return [[name.replace("_", " "), str(value)] for name, value in values.items() if value not in (None, "", {})]


_KINDS = {"!": "bad", "+": "good"}


def _cell(text: str) -> str:
    return _marked("td", text)


def _marked(tag: str, text: str, figure: str = "") -> str:
    kind = _KINDS.get(text[:1])
    opening = tag + (f' data-figure="{escape(figure)}"' if figure else "") + (f' class="{kind}"' if kind else "")
    return f"<{opening}>{escape(text[1:] if kind else text)}</{tag}>"
