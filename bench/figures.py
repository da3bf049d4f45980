"""Standalone SVG plots for documents, with their own colours and legends. Knows points, no benchmark."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from report.plot import COLOURS, Axis, Line, Point, lines

_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; }
text { fill: #4b5563; } .title { font-size: 14px; fill: #111827; }
.grid { stroke: #e5e7eb; } .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""
_WIDTH, _TOP, _HEIGHT, _LEGEND = 560, 26, 240, 24
_NAMES, _ROW = 262, 17
"""Pixels: width of the names, height of a bar with its spacing."""


def write(file: Path, title: str, points: Mapping[str, Sequence[Point]], measured: str = "output tokens/s") -> None:
    """What was measured over requests at a time, a line for each name."""
    named = [Line(name, line) for name, line in points.items() if line]
    drawn = lines(named, Axis("requests at a time", log=True), Axis(measured))
    body = drawn[drawn.index(">") + 1 : drawn.index("</svg>")]
    legend, left = [], 60
    for number, line in enumerate(named):
        colour = COLOURS[number % len(COLOURS)]
        legend.append(f'<rect x="{left}" y="8" width="10" height="10" rx="2" fill="{colour}"/>')
        legend.append(f'<text x="{left + 15}" y="17">{escape(line.name)}</text>')
        left += 30 + 7 * len(line.name)
    body = f'<g transform="translate(0 {_TOP})">{body}</g>'
    legends = f'<g transform="translate(0 {_TOP + _HEIGHT})">{"".join(legend)}</g>'
    _save(file, title, 60, _HEIGHT + _LEGEND, body + legends)


def against(file: Path, title: str, ratios: Mapping[str, float]) -> None:
    """A bar for each ratio, and a line at 1; ratios below 1 have another colour."""
    wide = (_WIDTH - _NAMES - 40) / max([1.0, *ratios.values()])
    parts = []
    for number, (name, ratio) in enumerate(ratios.items()):
        top, colour = _TOP + 6 + number * _ROW, COLOURS[0 if ratio >= 1 else 1]
        parts.append(f'<text x="{_NAMES - 8}" y="{top + 10}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{_NAMES}" y="{top}" width="{ratio * wide:.1f}" height="{_ROW - 4}" fill="{colour}"/>')
        parts.append(f'<text x="{_NAMES + ratio * wide + 5:.1f}" y="{top + 10}">{ratio:.2f}</text>')
    height = len(ratios) * _ROW + 12
    one = f'x1="{_NAMES + wide:.1f}" x2="{_NAMES + wide:.1f}" y1="{_TOP}" y2="{_TOP + height - 6}"'
    _save(file, title, 12, height, f'{"".join(parts)}<line {one} stroke="#111827"/>')


def _save(file: Path, title: str, left: int, height: int, body: str) -> None:
    """Write an SVG file with a title above `body`."""
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_TOP + height}" role="img">'
        f'<style>{_STYLE}</style><text x="{left}" y="18" class="title">{escape(title)}</text>{body}</svg>\n'
    )
