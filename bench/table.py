"""Figures beside their goals: one line each, for the terminal and for JSON. Knows no measurement."""

import argparse
import json
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine

_COMPARE = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str = ""
    goal: str = ""
    """">= 100000" or "<= 2.5", in the same unit; empty if there is none."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if not self.goal:
            return None
        sign, limit = self.goal.split()
        return bool(_COMPARE[sign](self.value, float(limit)))


def show(title: str, figures: Iterable[Figure], out: Console) -> None:
    """A table of figures."""
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
    """The figures and the machine as JSON."""
    lines = [{**asdict(figure), "met": figure.met} for figure in figures]
    file.write_text(json.dumps({"machine": machine.describe(), "figures": lines}, indent=1) + "\n")


def show_machine(out: Console) -> None:
    """What the figures were measured on."""
    for name, value in machine.describe().items():
        out.print(f"{name:<14}{value}", markup=False, highlight=False)


def arguments(what: str, parts: Iterable[str]) -> argparse.Namespace:
    """The command line that benchmarks of several parts share."""
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
