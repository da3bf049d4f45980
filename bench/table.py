"""Measured figures and their goals: one line each, for the terminal and for JSON. Knows no measurement."""

import argparse
import json
import operator
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from report import machine

Part = tuple[str, Callable[[], Awaitable[list["Figure"]]]]
"""A title, and a function that measures the figures below it."""

_COMPARE = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str = ""
    goal: str = ""
    """For example ">= 100000" or "<= 2.5", in the same unit; empty: no goal."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if not self.goal:
            return None
        sign, limit = self.goal.split()
        return bool(_COMPARE[sign](self.value, float(limit)))


def selected(name: str, patterns: Iterable[str] | None) -> bool:
    """Whether a row's whole name matches one of the patterns (`8b decode 1`, `*decode*`); without patterns, always."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def show(title: str, figures: Iterable[Figure], out: Console) -> None:
    """Print a table of figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measured")
    for name in ("value", "goal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for figure in figures:
        verdict = {True: "[green]reached[/green]", False: "[red]short[/red]", None: ""}[figure.met]
        value = f"{_spoken(figure.value)} {figure.unit}".rstrip()
        sign, _, limit = figure.goal.partition(" ")
        goal = f"{sign} {_spoken(float(limit))}" if figure.goal else ""
        table.add_row(figure.name, value, goal, " ".join(filter(None, (verdict, figure.note))))
    out.print(table)


def save(file: Path, figures: Iterable[Figure]) -> None:
    """Write the figures and the machine as JSON."""
    lines = [{**asdict(figure), "met": figure.met} for figure in figures]
    file.write_text(json.dumps({"machine": machine.describe(), "figures": lines}, indent=1) + "\n")


def show_machine(out: Console) -> None:
    """Print the machine that the figures were measured on."""
    for name, value in machine.describe().items():
        out.print(f"{name:<14}{value}", markup=False, highlight=False)


async def measure(what: str, parts: Mapping[str, Part]) -> None:
    """Run the parts that the command line names, or all, and print their figures."""
    asked = _arguments(what, parts)
    out = Console(width=150 if not sys.stdout.isatty() else None)
    show_machine(out)
    figures = []
    for name in asked.parts or parts:
        title, part = parts[name]
        figures += (new := await part())
        show(f"{title} (load average {os.getloadavg()[0]:.1f})", new, out)
    if asked.json:
        save(asked.json, figures)


def _arguments(what: str, parts: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("parts", nargs="*", help=f"measure only these: {', '.join(parts)}")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parsed = parser.parse_args()
    unknown = set(parsed.parts) - set(parts)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return parsed


def _spoken(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
