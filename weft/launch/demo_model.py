"""Finds the checkpoint of the demo model."""

from pathlib import Path

_MODELS = Path(__file__).resolve().parents[2] / "models"


class NoDemoModel(Exception):
    """There is no checkpoint in models/."""


def model_folder(models: Path = _MODELS) -> Path:
    """The largest checkpoint that ships with the project. Raises NoDemoModel."""
    folders = [config.parent for config in models.glob("*/config.json")]
    if not folders:
        raise NoDemoModel(f"no checkpoint in {models}: name one with --model, or make train-demo")
    return max(folders, key=lambda folder: sum(shard.stat().st_size for shard in folder.glob("*.safetensors")))
