"""Results of slow tests in a committed file, each with the content that had it. Knows text, never what was tested.

A line is a name, the content's hash and the result. What has a line need not be computed again, as long as a random
sample is, in each run; what has none is. `make record-kernels` computes everything and writes the files anew.
"""

from pathlib import Path


class ContentRecord:
    """The results in a file, by name and content. fresh: to forget what the file holds."""

    def __init__(self, file: Path, fresh: bool = False) -> None:
        self.file, self.fresh = file, fresh
        lines = [] if fresh or not file.exists() else file.read_text().splitlines()
        self.known = dict(_parsed(line) for line in lines)
        self.used: dict[str, str] = {}
        """The results that this run remembered or found."""

    def write(self) -> None:
        """Replace the file by the results of this run: call it where nothing failed."""
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text("".join(f"{key} {result}\n" for key, result in sorted(self.used.items())))


def key_of(name: str, content: str) -> str:
    """What a result belongs to. A name's spaces become underscores; content is a hash."""
    return f"{name.replace(' ', '_')} {content}"


def _parsed(line: str) -> tuple[str, str]:
    name, content, result = line.split(maxsplit=2)
    return f"{name} {content}", result
