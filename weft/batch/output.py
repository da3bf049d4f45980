"""The output file of a batch: whole lines, each once, whatever ends the process. Knows lines, no requests.

A line is appended by one write. A process that is killed may leave an incomplete last line: it is removed when the file
is opened again.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self


class OutputError(Exception):
    """The file cannot be continued. The message is one line."""


class Output:
    """An output file that no other process writes. `with` closes it."""

    def __init__(self, path: Path, expected: Mapping[str, str]) -> None:
        """`expected`: request id by custom id. Raises OutputError if the file has other lines; OSError."""
        self.done: set[str] = set()
        """Custom ids of the lines."""
        self.failed = 0
        """Lines with an error."""
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is no file that a batch can be continued in")
        self._file: BinaryIO = path.open("a+b", buffering=0)
        try:
            self._lock(path)
            self._read(path, expected)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()
        self._file.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends a line."""
        custom_id = line["custom_id"]
        assert custom_id not in self.done
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        start = self._file.tell()
        written = self._file.write(data)
        if written != len(data):  # The disk is full: nothing of the line may stay.
            self._file.truncate(start)
            raise OSError("the line could not be written whole")
        self._count(line)

    def sync(self) -> None:
        """Waits until the lines are on the disk."""
        os.fsync(self._file.fileno())

    def _count(self, line: Mapping[str, Any]) -> None:
        self.done.add(line["custom_id"])
        response = line["response"]
        self.failed += response is None or response["status_code"] != 200

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another process writes {path}") from None

    def _read(self, path: Path, expected: Mapping[str, str]) -> None:
        self._file.seek(0)
        end = 0
        with path.open("rb") as lines:
            for number, data in enumerate(lines, 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    line = json.loads(data)
                    custom_id, own_id = line["custom_id"], line["id"].removeprefix("batch_req_")
                    known = expected[custom_id].removeprefix("batch-") == own_id and custom_id not in self.done
                    self._count(line)
                except (ValueError, TypeError, KeyError, AttributeError):
                    known = False
                if not known:
                    raise OutputError(f"line {number} of {path} is not of this batch: choose another output file")
                end += len(data)
        self._file.truncate(end)
        self._file.seek(end)
