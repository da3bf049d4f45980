"""A fingerprint says which weights these are: of equal ones answers and keys may be shared."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.worker.loader.checkpoint import fingerprint
from services.worker.loader.tensors import SINGLE


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_other_weights_are_another_model(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = checkpoint("llama")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert fingerprint(other) == fingerprint(folder)
    tensors = load_file(other / SINGLE)
    tensors[name] *= 1.05
    save_file(tensors, other / SINGLE, {"format": "pt"})
    assert (other / SINGLE).stat().st_size == (folder / SINGLE).stat().st_size
    assert fingerprint(other) != fingerprint(folder)


def test_other_numerics_are_another_model(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    assert fingerprint(folder, "float32") != fingerprint(folder, "bfloat16")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", bytes(7)])
def test_damaged_weights_have_one_too(checkpoint: Callable[[str], Path], tmp_path: Path, content: bytes) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "damaged"))
    (folder / SINGLE).write_bytes(content)
    assert fingerprint(folder) != fingerprint(checkpoint("llama"))
