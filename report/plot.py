"""Draws small plots as inline SVG: lines over two axes, and one stacked bar. Knows points only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#65a30d", "#6b7280")
_ON_DARK = ("#86b0ff", "#f5a753", "#4ecb94", "#ff9086", "#b79bff", "#5ccbe8", "#a7d65f", "#aeb3bd")
_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 12, 44


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """The label and the scale of an axis."""

    label: str
    log: bool = False
    whole: bool = False
    """Its values are whole numbers, such as those of layers."""


def colours() -> str:
    """The style sheet of the colours of lines, bars and legends, for light and dark pages."""
    pairs = enumerate(zip(COLOURS, _ON_DARK, strict=True))
    return "".join(
        f".s{number} {{ stroke: light-dark({light}, {dark}); }} "
        f".f{number} {{ fill: light-dark({light}, {dark}); background: light-dark({light}, {dark}); }}\n"
        for number, (light, dark) in pairs
    )


def lines(series: Sequence[Line], x: Axis, y: Axis) -> str:
    """An SVG of lines; an empty plot without points."""
    points = [point for line in series for point in line.points]
    across = _Scale([p[0] for p in points], x, _LEFT, _WIDTH - _RIGHT)
    up = _Scale([p[1] for p in points], y, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(across, up, x, y)]
    for number, line in enumerate(series):
        parts.append(_line([(across(px), up(py)) for px, py in line.points], number % len(COLOURS)))
    return _svg(_HEIGHT, parts) + (_legend([line.name for line in series]) if len(series) > 1 else "")


def bar(shares: Sequence[tuple[str, float]], unit: str) -> str:
    """An SVG of one bar, divided in proportion to the values."""
    total = sum(value for _, value in shares) or 1.0
    parts, left = [], 0.0
    for number, (name, value) in enumerate(shares):
        width = value / total * _WIDTH
        title = f"<title>{escape(name)}: {value:.2f} {escape(unit)}</title>"
        colour = number % len(COLOURS)
        look = f'class="f{colour}" fill="{COLOURS[colour]}"'
        parts.append(f'<rect x="{left:.1f}" y="4" width="{width:.1f}" height="26" {look}>{title}</rect>')
        left += width
    return _svg(34, parts) + _legend([f"{name} {value:.2f} {unit}" for name, value in shares])


def _line(points: Sequence[Point], colour: int) -> str:
    """A line in pixels; a dot if it has one point alone, of which a line would show nothing."""
    if len(points) == 1:
        (x, y) = points[0]
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="f{colour}" fill="{COLOURS[colour]}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" class="line s{colour}" stroke="{COLOURS[colour]}"/>'


_LEAST_TICKS = 4
_FACTORS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Ticks of a decade of a logarithmic axis, the fewest first."""


class _Scale:
    """Maps values to pixels. A linear axis ends at a tick."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float) -> None:
        self.log = axis.log
        self._whole = axis.whole
        usable = [value for value in values if value > 0] if axis.log else list(values)
        self.least = min(usable, default=1.0 if axis.log else 0.0)
        self.greatest = max(usable, default=1.0)
        if not axis.log:
            self.least = min(0.0, self.least)
        if self.greatest <= self.least:
            self.greatest = self.least * 2 if axis.log else self.least + 1
        self._start, self._end = start, end
        if not axis.log:
            step = self._step()
            self.least = math.floor(self.least / step + 1e-9) * step
            self.greatest = math.ceil(self.greatest / step - 1e-9) * step

    def __call__(self, value: float) -> float:
        turn: Callable[[float], float] = math.log if self.log else float
        least = turn(self.least)
        share = (turn(max(value, self.least)) - least) / (turn(self.greatest) - least)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values along the axis: four to ten, fewer where whole numbers are few."""
        if self.log:
            for factors in _FACTORS:
                ticks = self._powers(factors)
                if len(ticks) >= _LEAST_TICKS:
                    return ticks[:: -(-len(ticks) // 10)]
        step = self._step()
        first = math.ceil(self.least / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.greatest / step + 1e-9) + 1)]

    def _powers(self, factors: Sequence[float]) -> list[float]:
        """The products of these factors and powers of ten that are on the axis."""
        low, high = math.floor(math.log10(self.least)), math.ceil(math.log10(self.greatest))
        ticks = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
        return [tick for tick in ticks if self.least <= tick <= self.greatest]

    def _step(self) -> float:
        """The distance of the ticks of a linear axis, or of a logarithmic one of less than a few steps."""
        span = self.greatest - self.least
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 6)
        return max(1.0, math.ceil(step)) if self._whole else step


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in across.ticks():
        at = across(tick)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 21}" text-anchor="middle">{_number(tick)}</text>')
    for tick in up.ticks():
        at = up(tick)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x.label)}</text>')
    turned = f'transform="rotate(-90 12 {middle})" text-anchor="middle"'
    parts.append(f'<text x="12" y="{middle}" {turned}>{escape(y.label)}</text>')
    return "".join(parts)


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:.6g}"


def _legend(names: Sequence[str]) -> str:
    items = (
        f'<span><i class="f{number % len(COLOURS)}"></i>{escape(name)}</span>' for number, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
