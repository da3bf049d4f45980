"""The progress of a run on stderr. Imports nothing heavy: command lines begin here."""

import contextlib
from collections.abc import Iterator

from report.console import Progress, console, progress

__all__ = ["Progress", "bars"]


@contextlib.contextmanager
def bars() -> Iterator[Progress]:
    """A bar for each phase on a terminal; elsewhere a line now and then."""
    with progress(console(stderr=True)) as show:
        yield show
