"""A tiny GPT-2 that `weft export` has written for other runtimes. Knows one model, no engine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def weft_export(form: str, model: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    """Runs the command."""
    command = [sys.executable, "-c", "from weft.main import main; main()", "export", form, str(model), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def plain_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, with one layer: the exporter takes seconds for each."""
    from tests.checkpoints import Shape, make_checkpoint  # Imports torch, which few tests need.

    return make_checkpoint(tmp_path_factory.mktemp("exports") / "gpt2", Shape("gpt2", {"n_layer": 1}))


@pytest.fixture(scope="session")
def exported_gpt2(plain_gpt2: Path) -> Path:
    """A folder with what `weft export` wrote of it."""
    out = plain_gpt2.with_name("exported")
    made = weft_export("onnx", plain_gpt2, out)
    assert made.returncode == 0, made.stderr
    return out


def copy_of(folder: Path, to: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder, to))
