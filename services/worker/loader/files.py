"""Reads JSON files of a checkpoint and refuses what is not a regular file. Knows files, never what they mean."""

import json
from pathlib import Path
from typing import Any

from services.worker.errors import CheckpointError


def parse_json(content: bytes, name: str) -> Any:
    """The JSON value of a file's content, or of a part of it; `name` is for messages. Raises CheckpointError."""
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
        check_regular(path)
        content = parse_json(path.read_bytes(), path.name)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return content
