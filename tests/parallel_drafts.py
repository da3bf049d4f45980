"""Parallel draft models for tests: checkpoints with a mask token."""

import json
import shutil
from pathlib import Path
from typing import Any

MASK = 5


def with_mask(folder: Path, to: Path, token: Any = MASK) -> Path:
    """A copy of a checkpoint with this mask token."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "pard_token": token}))
    return to
