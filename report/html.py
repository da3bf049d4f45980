"""Builds one self-contained HTML document of tiles, cards, tables and the result as JSON. Knows no figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from report.plot import colours

_STYLE = """
:root {
  color-scheme: light dark; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --bg: light-dark(#f7f6f3, #15171b); --surface: light-dark(#ffffff, #1d2026); --line: light-dark(#dcd8d0, #343a43);
  --text: light-dark(#1e1c19, #eceae6); --muted: light-dark(#5c574e, #aeb3bd);
  --bad: light-dark(#b02318, #ff9086); --good: light-dark(#17693a, #74d497);
  color: var(--text); background: var(--bg);
}
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0 0 .2rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .5rem; }
header p, .said { color: var(--muted); margin: 0; }
.said { margin: 0 0 .6rem; font-size: .9rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.tile, .card { background: var(--surface); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: .6rem 1rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); }
.cards { display: grid; gap: 1rem; align-items: start; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.card { padding: 1rem; min-width: 0; }
.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; max-width: 640px; height: auto; } svg text { font-size: 12px; fill: var(--muted); }
svg .grid { stroke: var(--line); } svg .line { stroke-width: 2; stroke-linejoin: round; fill: none; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--muted); outline-offset: 4px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { text-align: right; padding: .25rem 0 .25rem .9rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
th { color: var(--muted); font-weight: 500; }
th:first-child, td:first-child {
  text-align: left; padding-left: 0; white-space: pre-wrap; position: sticky; left: 0; background: var(--surface);
}
table.text td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; }
table.text td:first-child { min-width: 6.5rem; overflow-wrap: normal; }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); }
ul.facts { margin: 0; padding-left: 1.1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0 0; color: var(--muted); font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .35em; }
@media print { .scroll { overflow: visible; } .card { break-inside: avoid; } }
"""


def document(title: str, below: str, body: Iterable[str], result: Mapping[str, Any]) -> str:
    """The whole page, with `result` embedded as JSON for programs."""
    data = json.dumps(result).replace("</", "<\\/")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}{colours()}</style></head><body>'
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
    """A table of figures, or without a head of texts, whose lines break. A cell that begins with "!" is bad, with "+"
    good. A table that is wider than its card scrolls, its first column excepted."""
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table{"" if head else " class=text"}>{top}{body}</table></div>'


def facts(lines: Iterable[str]) -> str:
    """A list of sentences."""
    return f'<ul class="facts">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


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
