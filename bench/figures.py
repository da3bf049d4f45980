"""Plots that stand alone, for pages that show files: SVG with its own colours and words. Knows points, no benchmark."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from report.plot import COLOURS, Axis, Line, Point, lines

_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; }
text { fill: #4b5563; } .title { font-size: 14px; fill: #111827; }
.grid { stroke: #e5e7eb; } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""
_WIDTH, _TOP, _HEIGHT, _LEGEND = 560, 26, 240, 24


def write(file: Path, title: str, points: Mapping[str, Sequence[Point]]) -> None:
    """Output tokens per second over requests at a time, a line for each name."""
    named = [Line(name, line) for name, line in points.items() if line]
    drawn = lines(named, Axis("requests at a time", log=True), Axis("output tokens/s"))
    body = drawn[drawn.index(">") + 1 : drawn.index("</svg>")]
    legend, left = [], 60
    for number, line in enumerate(named):
        colour = COLOURS[number % len(COLOURS)]
        legend.append(f'<rect x="{left}" y="8" width="10" height="10" rx="2" fill="{colour}"/>')
        legend.append(f'<text x="{left + 15}" y="17">{escape(line.name)}</text>')
        left += 30 + 7 * len(line.name)
    height = _TOP + _HEIGHT + _LEGEND
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f'<style>{_STYLE}</style><text x="60" y="18" class="title">{escape(title)}</text>'
        f'<g transform="translate(0 {_TOP})">{body}</g>'
        f'<g transform="translate(0 {_TOP + _HEIGHT})">{"".join(legend)}</g></svg>\n'
    )
