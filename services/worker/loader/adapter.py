"""Reads the folder of a low-rank adapter as PEFT saves it. Knows its files and settings, never a model's shapes.

What is not supported is refused by name: every setting that changes what an adapter computes is on one of two lists.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from services import hashing
from services.worker.errors import CheckpointError
from services.worker.loader.files import _read_json
from services.worker.loader.tensors import FLOATS, Checkpoint, open_file, type_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NO_MATTER = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "target_modules", "task_type", "use_rslora", "runtime_config", "ensure_weight_tying",
})  # fmt: skip
"""Settings that are read here, that concern training alone, or that the tensors' names show."""
_OFF: Mapping[str, object] = {"bias": "none"}
"""Values, beside null, false, 0 and empty ones, with which a setting changes nothing."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initial values of the matrices for which the weights of the base are changed, too."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as its folder has it."""

    rank: int
    fingerprint: bytes
    """Equal for adapters of equal matrices and scale."""
    modules: Mapping[str, tuple[Tensor, Tensor]]
    """A [r, inputs] and B [outputs, r], times the scale, of each module by its name in the base."""


def read_adapter(folder: Path, most_rank: int) -> StoredAdapter:
    """Read settings and matrices. Raises CheckpointError, in one line that names what is not supported."""
    settings = _read_json(folder / CONFIG)
    rank, scale = _read_settings(settings, most_rank)
    if not (folder / WEIGHTS).exists():
        pickled = "; adapter_model.bin is a pickle" if (folder / "adapter_model.bin").exists() else ""
        raise CheckpointError(f"{WEIGHTS} is missing{pickled}")
    stored = open_file(folder / WEIGHTS)
    modules, parts = {}, [scale.hex().encode()]
    with stored.opened() as read:
        for module, names in sorted(_pairs(stored, rank).items()):
            a, b = (read(name) for name in names)
            parts += [module.encode(), *(_contents(tensor) for tensor in (a, b))]
            modules[module] = a.float(), b.float() * scale
    return StoredAdapter(rank, hashing.digest(b"weft/adapter/1", *parts), modules)


def _contents(tensor: Tensor) -> bytes:
    return tensor.float().numpy().tobytes()


def _read_settings(settings: Mapping[str, Any], most_rank: int) -> tuple[int, float]:
    """-> rank and scale."""
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"{CONFIG}: peft_type {settings.get('peft_type')} is not supported; supported is LORA")
    if settings.get("task_type") not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{CONFIG}: task_type {settings['task_type']} is not supported; supported is CAUSAL_LM")
    initial = settings.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(f"{CONFIG}: init_lora_weights {initial} is not supported: it changes the base, too")
    for name, value in settings.items():
        if value and name not in _NO_MATTER and _OFF.get(name) != value:
            raise CheckpointError(f"{CONFIG}: {name} is not supported")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{CONFIG}: r must be a positive integer")
    if rank > most_rank:
        raise CheckpointError(f"{CONFIG}: r {rank} is above this worker's largest rank, {most_rank} (MAX_LORA_RANK)")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{CONFIG}: lora_alpha must be a finite number")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pairs(stored: Checkpoint, rank: int) -> dict[str, tuple[str, str]]:
    """The names of A and B of each module. Raises CheckpointError for a tensor that is neither."""
    found: dict[str, dict[str, str]] = {}
    for name in stored.headers:
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in ("lora_A", "lora_B") or not name.endswith(".weight") or not module.startswith(_PREFIX):
            raise CheckpointError(f"{WEIGHTS}: tensor {name} is not supported; supported are lora_A and lora_B")
        found.setdefault(module.removeprefix(_PREFIX), {})[kind] = name
    if not found:
        raise CheckpointError(f"{WEIGHTS} has no tensors")
    for message in _faults(stored, found, rank):
        raise CheckpointError(f"{WEIGHTS}: {message}")
    return {module: (names["lora_A"], names["lora_B"]) for module, names in found.items()}


def _faults(stored: Checkpoint, found: Mapping[str, Mapping[str, str]], rank: int) -> Iterator[str]:
    for module, names in found.items():
        if len(names) < 2:
            yield f"module {module} has {min(names)} alone"
            continue
        for kind, dimension in (("lora_A", 0), ("lora_B", 1)):
            header = stored.headers[names[kind]]
            if header.dtype not in FLOATS:
                yield f"tensor {names[kind]} has type {type_name(header.dtype)}"
            if len(header.shape) != 2 or header.shape[dimension] != rank:
                yield f"tensor {names[kind]} of shape {list(header.shape)} is not of rank {rank}"
