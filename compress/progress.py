"""The progress callback of runs, and the bars that display it. Imports nothing heavy: command lines import it."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]
"""Called with (phase, steps done, steps in total)."""


@contextlib.contextmanager
def bars() -> Iterator[Progress]:
    """Show a bar for each phase on a terminal; nothing in a pipe."""
    out, phases = Console(stderr=True), {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=out, disable=not out.is_terminal) as shown:

        def told(phase: str, done: int, total: int) -> None:
            if phase not in phases:
                phases[phase] = shown.add_task(phase, total=total)
            shown.update(phases[phase], completed=done)

        yield told
