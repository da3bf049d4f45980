"""What a checkpoint's folder says without its weights being loaded: the model card and the tokenizer bundle.

Only tokenizer.json and JSON files are read: no pickle, no code of the checkpoint.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protos import mesh_pb2 as mesh
from services import hashing
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.files import parse_json
from services.worker.models.config import ModelConfig

FILES = ["*.json", "*.safetensors", "*.jinja"]
"""What is fetched of a hub's repository; a star means folders, too."""
OTHER_FILES = ["*/*", "consolidated*"]
"""What is not: other formats in folders, and Mistral's second copy of the same weights."""
_SAMPLE_BYTES = 1 << 12
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def locate(model: str) -> Path:
    """The folder of a checkpoint: a path, a preset of random weights, or a hub id that is fetched or already
    in the local cache.

    Raises CheckpointError.
    """
    if not model:
        raise CheckpointError("no model: set MODEL_NAME to a checkpoint's folder or hub id")
    if model.startswith(presets.PREFIX):
        return presets.folder_of(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"no checkpoint folder at {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=FILES, ignore_patterns=OTHER_FILES))
    except (LocalEntryNotFoundError, RepositoryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        raise CheckpointError(f"{model} is neither a folder nor to be had from the hub") from None


def read_bundle(folder: Path) -> mesh.Bundle:
    """The tokenizer, chat template and special tokens of a checkpoint. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError("the checkpoint has no tokenizer.json")
    tokenizer = path.read_bytes()
    told = parse_json(tokenizer, path.name)
    if not isinstance(told, dict) or "model" not in told:
        raise CheckpointError("tokenizer.json describes no tokenizer")
    try:
        return _bundle(tokenizer, _json(folder / "tokenizer_config.json"), folder / "chat_template.jinja")
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"chat template or special tokens cannot be read: {reason}") from None


def _bundle(tokenizer: bytes, config: dict[str, Any], template_file: Path) -> mesh.Bundle:
    template = config.get("chat_template") or ""
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    if isinstance(template, list):  # Several named templates: the default one is for chats.
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    bundle = mesh.Bundle(tokenizer_json=tokenizer, chat_template=template)
    for name in _SPECIAL:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text:
            bundle.special_tokens[name] = text
    return bundle


def serialize(bundle: mesh.Bundle) -> tuple[bytes, bytes]:
    """A bundle's bytes, the same for the same bundle, and their SHA-256."""
    data = bundle.SerializeToString(deterministic=True)
    return data, hashlib.sha256(data).digest()


def fingerprint(folder: Path, *numerics: str) -> bytes:
    """SHA-256 over configuration, weights' identity and numerics."""
    configuration = json.dumps(_json(folder / "config.json"), sort_keys=True)
    return hashing.digest(configuration.encode(), *(part.encode() for part in numerics), *_identity(folder))


def _identity(folder: Path) -> Iterator[bytes]:
    """Of the weights: each file's header, and samples of each tensor. What is damaged is refused when it is loaded."""
    for shard in filter(Path.is_file, sorted(folder.glob("*.safetensors"))):
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, size))
            yield shard.name.encode()
            yield header
            for begin, end in _places(header, size):
                last = max(begin, end - _SAMPLE_BYTES)
                for place in sorted({begin, (begin + last) // 2, last}):
                    file.seek(8 + length + place)
                    yield file.read(min(_SAMPLE_BYTES, end - begin))


def _places(header: bytes, size: int) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file begin and end, behind its header; none where that cannot be read."""
    try:
        entries = json.loads(header)
        places = (map(int, entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
        return [(begin, end) for begin, end in places if 0 <= begin <= end <= size]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return []


def model_card(
    folder: Path, config: ModelConfig, *, name: str, context_length: int, block_size: int, parameters: int
) -> mesh.ModelCard:
    """The card of a loaded model, all but what identifies it (aliases, fingerprint, bundle)."""
    return mesh.ModelCard(
        name=name or folder.resolve().name,
        architecture=config.architecture,
        context_length=context_length,
        vocab_size=config.vocab_size,
        parameters=parameters,
        block_size=block_size,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = parse_json(path.read_bytes(), path.name)
    return value if isinstance(value, dict) else {}
