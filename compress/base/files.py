"""Checks a base's files before transformers reads them. Knows JSON and headers, no networks.

transformers waits for a pipe, turns integers into weights, and passes over settings that it cannot read.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from compress.errors import CompressError

_READ = (".json", ".jinja", ".safetensors", ".bin")
_COPIED = ("tokenizer*.json", "special_tokens_map.json", "generation_config.json", "*.jinja")
_PLAIN = ("F32", "F16", "BF16", "F64")


def copied(folder: Path) -> list[Path]:
    """Files that are copied from the base unchanged."""
    return [file for pattern in _COPIED for file in sorted(folder.glob(pattern))]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CompressError."""
    _check_regular(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise CompressError(f"{file.parent}: {file.name} cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise CompressError(f"{file.parent}: {file.name} is not an object")
    return content


def check(folder: Path) -> None:
    """Raises CompressError for an unreadable file, or tensors of quantized types in a plain checkpoint."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ:
            _check_regular(file)
    for file in copied(folder):
        if file.suffix == ".json":
            read_json(file)
    for file in sorted(folder.glob("*.safetensors")):
        _check_plain(file)


def _check_regular(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise CompressError(f"{file.parent}: {file.name} is not a regular file")


def _check_plain(file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            for name in names:
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in _PLAIN:
                    plain = f"and no quantization_config; plain are {', '.join(_PLAIN)}"
                    raise CompressError(f"{file.parent}: tensor {name} has type {dtype} {plain}")
    except (SafetensorError, OSError) as error:
        raise CompressError(f"{file.parent}: {file.name} cannot be read: {error}") from None
