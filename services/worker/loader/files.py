"""Reads JSON files of a checkpoint and refuses what is not a regular file. Knows files, never what they mean."""

import json
from pathlib import Path
from typing import Any

from services.worker.errors import CheckpointError

MOST_JSON_BYTES = 16 << 20
"""Largest JSON file of a checkpoint, but for those below."""
MOST_TOKENIZER_BYTES = 64 << 20
MOST_INDEX_BYTES = 64 << 20
MOST_TEMPLATE_BYTES = 1 << 20
_MOST_VALUES = 3 << 20
"""Most values in a JSON text: each costs a hundred bytes of memory, however few it takes in the text."""


def read_bounded(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of a regular file. Raises CheckpointError for one that is larger, and OSError."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most_bytes) if path.stat().st_size <= most_bytes else None
    if content is None:
        raise CheckpointError(f"{path.name} is larger than {most_bytes >> 20} MiB")
    return content


def parse_json(content: bytes, name: str) -> Any:
    """The JSON value of a file's content, or of a part of it; `name` is for messages. Raises CheckpointError."""
    if content.count(b",") + content.count(b"[") + content.count(b"{") > _MOST_VALUES:
        raise CheckpointError(f"{name} has more than {_MOST_VALUES} values")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}") from None


def check_regular(path: Path) -> None:
    """Raises CheckpointError for a pipe, a socket or a device, which a read could wait for without end. An OSError is
    not caught."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name} is not a regular file")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises CheckpointError."""
    try:
        content = parse_json(read_bounded(path), path.name)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return content
