"""A tiny GPT-2 and a tiny BERT that `weft export` has written for other runtimes. Knows models, no engine."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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

    def make(folder: Path) -> None:
        from tests.checkpoints import Shape, make_checkpoint  # Imports torch, which few tests need.

        make_checkpoint(folder, Shape("gpt2", {"n_layer": 1}))

    return _made_once("gpt2", make, tmp_path_factory)


@pytest.fixture(scope="session")
def exported_gpt2(plain_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `weft export` wrote of it."""

    def make(folder: Path) -> None:
        made = weft_export("onnx", plain_gpt2, folder)
        assert made.returncode == 0, made.stderr

    return _made_once("gpt2-exported", make, tmp_path_factory)


@pytest.fixture
def exported_bert(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a folder with an encoder's weights and with what `weft export` wrote of them."""

    def make(folder: Path) -> None:
        from tests.encoders import make_encoder  # Imports torch, which few tests need.

        made = weft_export("onnx", make_encoder(folder / "weights"), folder / "exported")
        assert made.returncode == 0, made.stderr
        shutil.copyfile(folder / "weights" / "model.safetensors", folder / "exported" / "model.safetensors")

    return copy_of(_made_once("bert-exported", make, tmp_path_factory) / "exported", tmp_path / "tiny-bert")


def _made_once(name: str, make: Callable[[Path], None], factory: pytest.TempPathFactory) -> Path:
    """A folder that the first process which needs it makes; the others of this run of tests wait for it."""
    of_run = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder = of_run / name
    with (of_run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make(folder.with_suffix(".part"))
            folder.with_suffix(".part").rename(folder)
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder, to))
