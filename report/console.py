"""The output of commands: how wide it is, counts for people, and progress on terminals and in pipes."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]
"""Takes the name of a phase, how much of it is done, and how much there is."""

_UNBOUNDED_WIDTH = 10_000
_LINE_EVERY_S = 10.0


def console(*, stderr: bool = False) -> Console:
    """Standard output (or error): colours on a terminal, plain text elsewhere, where no name or cell is cut short.

    Characters that its encoding lacks become question marks. Brackets are text: an answer may contain `[/INST]`.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    if stream.isatty():
        return Console(highlight=False, markup=False, stderr=stderr)
    return Console(highlight=False, markup=False, stderr=stderr, soft_wrap=True, width=_UNBOUNDED_WIDTH)


def bold(text: str) -> str:
    """The text in bold, for a line that is printed with `markup=True`; brackets in it are text."""
    return f"[bold]{escape(text)}[/bold]"


def amount(count: int) -> str:
    """A count for people: 11.3 M."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def counted(count: int, noun: str) -> str:
    """A number of things that have a regular plural: 1 worker, 2 workers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextlib.contextmanager
def progress(out: Console, every_s: float = _LINE_EVERY_S) -> Iterator[Progress]:
    """On a terminal a bar for each phase; elsewhere a line at a phase's start and end, and every `every_s` seconds."""
    if not out.is_terminal:
        yield _Lines(out, every_s)
        return
    phases = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=out, transient=True) as bars:

        def update(phase: str, done: int, total: int) -> None:
            if phase not in phases:
                phases[phase] = bars.add_task(phase, total=total)
            bars.update(phases[phase], completed=done, total=total)

        yield update


class _Lines:
    """Progress as lines, at most one in `every_s` seconds of a phase beside its first and its last."""

    def __init__(self, out: Console, every_s: float) -> None:
        self._out = out
        self._every_s = every_s
        self._printed: dict[str, tuple[float, int]] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        printed_at, last = self._printed.get(phase, (-self._every_s, -1))
        if done == last or (now - printed_at < self._every_s and done < total):
            return
        self._printed[phase] = now, done
        self._out.print(f"{phase}: {done} of {total}", markup=False)
