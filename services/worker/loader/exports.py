"""Finds the file of an exported model in a folder. Knows names of files, never what is in them. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from services.worker.errors import CheckpointError
from services.worker.loader.files import check_regular

NAMES: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("model.onnx", "onnx/model.onnx"),
    "tensorrt": ("model.onnx", "onnx/model.onnx"),
    "openvino": ("model.onnx", "onnx/model.onnx"),
    "exported": ("model.pt2", "model.pt", "model.ts"),
}
"""For each engine that computes exported files: where they are in a folder, the first of those that exist is taken."""
_WRITERS: Mapping[str, str] = {"onnxruntime": "onnx", "openvino": "onnx", "tensorrt": "onnx", "exported": "torch"}
"""What `weft export` calls the format of an engine."""


def has_export(folder: Path, engine: str) -> bool:
    """Whether a folder has a file that this engine computes."""
    return any((folder / name).exists() for name in NAMES.get(engine, ()))


def find_export(folder: Path, engine: str) -> Path:
    """The file that an engine computes. Raises CheckpointError if there is none."""
    for name in NAMES[engine]:
        if (path := folder / name).exists():
            check_regular(path)
            return path
    expected, written = " or ".join(NAMES[engine]), _WRITERS[engine]
    raise CheckpointError(f"no {expected} for ENGINE={engine} in {folder.name}: weft export {written} writes one")


def files_of(path: Path) -> list[Path]:
    """The file of an exported model and those beside it that hold its weights: what is loaded."""
    return sorted(each for each in path.parent.glob(f"{path.stem}.*") if each.suffix != ".json" and each.is_file())
