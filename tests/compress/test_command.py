"""`weft compress` and `weft verify` as people type them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.cli import app
from tests.checkpoints import make_checkpoint

WEFT = [sys.executable, "-c", "from client.cli import app; app()"]


def weft(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WEFT, *map(str, arguments)], capture_output=True, text=True, timeout=100)


def test_a_model_is_made_smaller_and_proved(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    made = weft("compress", "int8", base, tmp_path / "int8")
    assert made.returncode == 0, made.stderr
    assert "% of" in made.stdout
    proof = weft("verify", base, tmp_path / "int8", "--windows", 2, "--length", 64, "--answers", 1)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "int8 passes" in proof.stdout


def test_each_method_explains_itself() -> None:
    told = weft("compress", "--help").stdout
    for method in ("int8", "fp8", "awq", "gptq", "smoothquant", "qat", "prune", "shrink", "distill"):
        assert f" {method} " in told


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_weft(name: str) -> object:
        return None if name == "compressed_tensors" else object()

    monkeypatch.setattr(importlib.util, "find_spec", only_weft)
    told = CliRunner().invoke(app, ["compress", "int8"])
    assert told.exit_code == 1
    assert told.output.startswith("weft: compress needs compressed_tensors, which is not installed: make set-up")
    assert told.output.count("\n") == 1
