"""What a checkpoint's folder contains beside the weights: model card, tokenizer bundle, fingerprint.

Knows files; reads tokenizer.json or tokenizer.model and JSON files, never a pickle and never code of the checkpoint.
"""

import hashlib
from pathlib import Path
from typing import Any

from protos import mesh_pb2 as mesh
from services import hashing
from services.worker.errors import CheckpointError
from services.worker.loader import exports, presets
from services.worker.loader.digests import FileDigests
from services.worker.loader.files import (
    MOST_JSON_BYTES,
    MOST_TEMPLATE_BYTES,
    MOST_TOKENIZER_BYTES,
    parse_json,
    read_bounded,
)
from services.worker.loader.formats import sentencepiece
from services.worker.loader.tokenizer_check import check_template, check_tokenizer
from services.worker.loader.weight_files import weight_files
from services.worker.models.config import ModelConfig

FILES = ["*.json", "*.safetensors", "*.jinja", sentencepiece.NAME]
"""Patterns of files that are fetched from a repository of the hub; a star matches folders, too."""
OTHER_FILES = ["[!0-9]*/*", "consolidated*"]
"""Patterns of files that are not: other formats, which lie in folders (those with a number are modules of an embedder),
and Mistral's second copy of its weights."""
_HASHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    sentencepiece.NAME,
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What tokens depend on beside the weights."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def locate(model: str) -> Path:
    """The folder of a checkpoint, which is named by its path, as a preset of random weights, or by its hub id. A hub id
    is fetched unless the local cache has it.

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
    """The tokenizer, chat template and special tokens of a checkpoint. Raises CheckpointError also for a tokenizer that
    cannot be built and a template that does not compile: each request would fail at the gateway."""
    settings = _tokenizer_settings(folder)
    tokenizer = _read_tokenizer(folder, settings)
    check_tokenizer(tokenizer)
    try:
        bundle = _bundle(tokenizer, settings, folder / "chat_template.jinja")
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"chat template or special tokens cannot be read: {reason}") from None
    check_template(bundle.chat_template)
    return bundle


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The settings of tokenizer_config.json. As in transformers, special_tokens_map.json names the special tokens where
    these describe no added tokens, as those of earlier versions. Raises CheckpointError."""
    settings = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    named = _json(folder / "special_tokens_map.json")
    return settings | {name: named[name] for name in _SPECIAL if name in named}


def _read_tokenizer(folder: Path, settings: dict[str, Any]) -> bytes:
    """tokenizer.json, or what stands for it where there is a SentencePiece model alone. Raises CheckpointError."""
    path, model = folder / "tokenizer.json", folder / sentencepiece.NAME
    if not path.is_file():
        if model.is_file():
            return sentencepiece.tokenizer_json(_readable(model, MOST_TOKENIZER_BYTES), settings)
        raise CheckpointError(f"the checkpoint has neither tokenizer.json nor {model.name}")
    tokenizer = _readable(path, MOST_TOKENIZER_BYTES)
    content = parse_json(tokenizer, path.name)
    if not isinstance(content, dict) or "model" not in content:
        raise CheckpointError("tokenizer.json describes no tokenizer")
    return tokenizer


def _bundle(tokenizer: bytes, config: dict[str, Any], template_file: Path) -> mesh.Bundle:
    template = config.get("chat_template") or ""
    if template_file.exists():
        template = _readable(template_file, MOST_TEMPLATE_BYTES).decode()
    if isinstance(template, list):  # of several named templates the one called default is for chats
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    bundle = mesh.Bundle(tokenizer_json=tokenizer, chat_template=template)
    for name in _SPECIAL:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text:
            bundle.special_tokens[name] = text
    return bundle


def serialize(bundle: mesh.Bundle) -> tuple[bytes, bytes]:
    """A bundle's bytes, which are the same for equal bundles, and their SHA-256."""
    data = bundle.SerializeToString(deterministic=True)
    return data, hashlib.sha256(data).digest()


def start_hashing(folder: Path, engine: str = "") -> FileDigests:
    """Begins to hash all that an engine loads of a checkpoint, in threads: weights, configuration and tokenizer, whole.
    The caller loads meanwhile, calls `fingerprint` and leaves the context. Raises CheckpointError."""
    read = [folder / name for name in _HASHED if (folder / name).is_file()]
    exported = exports.has_export(folder, engine)
    weights = exports.files_of(exports.find_export(folder, engine)) if exported else weight_files(folder)
    return FileDigests([*read, *weights])


def fingerprint(digests: FileDigests, *numerics: str) -> bytes:
    """SHA-256 over every byte of the files that are loaded and over numerics, once `start_hashing` is done.

    Raises CheckpointError if a file cannot be read or changed meanwhile.
    """
    files = (part for name, digest in digests.result() for part in (name.encode(), digest))
    return hashing.digest(b"weft/model/2", *(part.encode() for part in numerics), *files)


def model_card(
    folder: Path, config: ModelConfig, *, name: str, context_length: int, block_size: int, parameters: int
) -> mesh.ModelCard:
    """The card of a loaded model without aliases, fingerprint and the bundle's digest, which the caller adds."""
    return mesh.ModelCard(
        name=name or folder.resolve().name,
        architecture=config.architecture,
        context_length=context_length,
        vocab_size=config.vocab_size,
        parameters=parameters,
        block_size=block_size,
    )


def _readable(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of a file. Raises CheckpointError."""
    try:
        return read_bounded(path, most_bytes)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None


def _json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if there is no such file or no object in it. Raises CheckpointError."""
    if not path.is_file():
        return {}
    value = parse_json(_readable(path), path.name)
    return value if isinstance(value, dict) else {}
