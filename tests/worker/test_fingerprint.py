"""A fingerprint says which weights these are: of equal ones answers and keys may be shared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.checkpoint import fingerprint
from services.worker.weights import INDEX, SINGLE


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy with other weights, in two files."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    owners = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(owners.values()):
        save_file({name: tensors[name] for name in tensors if owners[name] == file}, to / file)
    (to / INDEX).write_text(json.dumps({"weight_map": owners}))
    return to


def scaled(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].mul_(1.05)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_other_weights_are_another_model(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = checkpoint("llama")
    assert fingerprint(rewritten(folder, tmp_path / "other", scaled(name))) != fingerprint(folder)


def test_the_same_weights_are_the_same_model_in_other_files(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    same = rewritten(folder, tmp_path / "same", lambda tensors: None)
    assert fingerprint(same) == fingerprint(folder)
    assert fingerprint(same, "float32") != fingerprint(same, "bfloat16")
