"""Finds the files of a checkpoint's weights. Knows names and the index, never what is in the files.

Without torch: a process that computes nothing reads them, too.
"""

from pathlib import Path

from services.worker.errors import CheckpointError
from services.worker.loader.files import MOST_INDEX_BYTES, parse_json, read_bounded

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_FILES = 4096


def weight_files(model_dir: Path) -> list[Path]:
    """The files that `open_checkpoint` reads tensors from. If the index is damaged, or there is neither an index nor a
    single file: all safetensors files of the folder."""
    try:
        if owners := owners_in(model_dir):
            names = set(owners.values())
            return [path for path in (model_dir / name for name in sorted(names)) if path.is_file()]
        if (single := single_file(model_dir)) and single.is_file():
            return [single]
    except CheckpointError:
        pass  # `open_checkpoint` refuses it.
    return sorted(path for path in model_dir.glob("*.safetensors") if path.is_file())


def owners_in(model_dir: Path) -> dict[str, str]:
    """The file of each tensor of a sharded checkpoint. Empty: there is no index, or it stands beside a single file.
    transformers reads that one, and leaves an old index where it saves it. Raises CheckpointError."""
    if (model_dir / SINGLE).exists() or not (model_dir / INDEX).exists():
        return {}
    return read_index(model_dir / INDEX)


def single_file(model_dir: Path) -> Path | None:
    """The file of an unsharded checkpoint. AutoGPTQ chooses its own name for it: a lone safetensors file of any name
    counts."""
    if (model_dir / SINGLE).exists():
        return model_dir / SINGLE
    found = list(model_dir.glob("*.safetensors"))
    return found[0] if len(found) == 1 else None


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, according to the index. Raises CheckpointError."""
    try:
        owners = parse_json(read_bounded(path, MOST_INDEX_BYTES), path.name)["weight_map"]
    except (OSError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None
    if not isinstance(owners, dict) or not owners:
        raise CheckpointError(f"{path.name} names no tensors")
    if len(set(map(str, owners.values()))) > _MOST_FILES:
        raise CheckpointError(f"{path.name} names more than {_MOST_FILES} files")
    for name in owners.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path.name} names a file outside the checkpoint")
    return owners
