"""Reads a checkpoint's config.json, once for as long as it stays the same: the model's shape, end tokens and
quantization. Knows no family."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.worker.errors import CheckpointError
from services.worker.loader.files import _read_json
from services.worker.models.config import ModelConfig
from services.worker.models.raw_config import RawConfig
from services.worker.models.registry import family_of


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """All that the JSON settings of a checkpoint say of its model."""

    raw: Mapping[str, Any]
    """config.json as it is."""
    model: ModelConfig
    """With the end tokens of generation_config.json, or of config.json if there is none."""
    quantization: Mapping[str, Any] | None
    """The quantization_config of config.json; None: the weights are plain."""


_GENERATION = "generation_config.json"
_FileState = tuple[int, int, int]


def read_config(model_dir: Path) -> CheckpointConfig:
    """Read config.json and the end tokens of generation_config.json. Raises CheckpointError."""
    return _read_config(model_dir, _state(model_dir / "config.json"), _state(model_dir / _GENERATION))


def _state(path: Path) -> _FileState | None:
    """What changes with a file: inode, time and size; None if there is no such file."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


@lru_cache(maxsize=8)
def _read_config(model_dir: Path, config: _FileState | None, generation: _FileState | None) -> CheckpointConfig:
    raw = RawConfig(_read_json(model_dir / "config.json"))
    shape = family_of(raw.architecture).read_config(raw)
    quantization = raw.section("quantization_config")
    eos = _read_eos(raw, model_dir, shape.vocab_size)
    mask_token = _read_mask_token(raw, shape.vocab_size)
    model = replace(shape, eos_token_ids=eos, mask_token=mask_token, kv_dtype=_read_kv_dtype(quantization))
    return CheckpointConfig(raw.values, model, quantization.values or None)


def load_config(model_dir: Path) -> ModelConfig:
    """The model's part of `read_config`. Raises CheckpointError."""
    return read_config(model_dir).model


def _read_kv_dtype(quantization: RawConfig) -> str:
    """`kv_cache_scheme`: of compressed-tensors 8 bits, float or int; of AutoFP8 the word static, for FP8."""
    if quantization.get("kv_cache_scheme") == "static":
        return "fp8"
    scheme = quantization.section("kv_cache_scheme")
    if not scheme.values:
        return "auto"
    kind, bits = scheme.get("type", "int"), scheme.get("num_bits", 8)
    if bits != 8 or kind not in ("float", "int"):
        raise CheckpointError(
            f"kv_cache_scheme of {bits} bits ({kind}) is not supported; supported are 8, float or int"
        )
    return "fp8" if kind == "float" else "int8"


def _read_mask_token(raw: RawConfig, vocab_size: int) -> int | None:
    """`pard_token`, the mask token of a parallel draft model."""
    token = raw.get("pard_token")
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < vocab_size:
        raise CheckpointError(f"config.json: pard_token must be a token of the vocabulary, below {vocab_size}")
    return token


def _read_eos(raw: RawConfig, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """The end tokens that the checkpoint's generation settings name, else those of the model's. Without those beyond
    the vocabulary, which the model never draws."""
    path = model_dir / _GENERATION
    settings = _read_json(path) if path.exists() else {}
    eos = settings.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
        raise CheckpointError("eos_token_id is neither a token nor a list of tokens")
    return tuple(token for token in tokens if token < vocab_size)
