"""The terminal that commands write to."""

import sys

from rich.console import Console


def console() -> Console:
    """Standard output: colours on a terminal, plain text elsewhere."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())
