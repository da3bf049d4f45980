"""The commands `weft compress` and `weft verify`: flags, output and exit codes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compress.cli import app as compress
from tests.checkpoints import make_checkpoint
from verify.served import Served
from weft.cli.app import app

WEFT = "import sys; sys.modules['transformers'] = None; from weft.cli.app import app; app()"
"""Verifying imports no transformers, which takes seconds."""


def test_a_model_is_compressed_and_verified(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    made = CliRunner().invoke(app, ["compress", "int8", str(base), str(tmp_path / "int8")])
    assert made.exit_code == 0, made.output
    assert "% of" in made.stdout
    few = ["--windows", "2", "--length", "64", "--answers", "1"]
    command = [sys.executable, "-c", WEFT, "verify", str(base), str(tmp_path / "int8"), *few]
    proof = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "int8 passes" in proof.stdout


def test_each_method_has_a_help_page() -> None:
    ran = CliRunner().invoke(app, ["compress", "--help"]).stdout
    for method in ("int8", "fp8", "awq", "gptq", "smoothquant", "qat", "prune", "shrink", "distill", "heads"):
        assert f" {method} " in ran


def test_without_its_extra_the_command_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_weft(name: str) -> object:
        return None if name == "compressed_tensors" else object()

    monkeypatch.setattr(importlib.util, "find_spec", only_weft)
    ran = CliRunner().invoke(app, ["compress", "int8"])
    assert ran.exit_code == 1
    assert ran.output.startswith("weft: compress needs compressed_tensors, which is not installed: make set-up")
    assert ran.output.count("\n") == 1


def test_a_share_that_a_pattern_cannot_have_is_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    flags = ["--pattern", "2:4", "--sparsity", "0.8"]
    ran = CliRunner().invoke(compress, ["prune", str(base), str(tmp_path / "out"), *flags], catch_exceptions=False)
    assert ran.exit_code == 1
    assert "2:4 is a sparsity of 0.5: leave --sparsity 0.8 out" in ran.output


@pytest.mark.parametrize(
    "flags",
    [
        ("qat", "--group", "32"),
        ("prune", "--pattern", "2:4"),
        ("prune", "--magnitude", "--sparsity", "0.3"),
        ("shrink", "--neurons", "0.34", "--layers", "1", "--kv-heads", "1"),
        ("distill", "--fresh", "--temperature", "2", "--hard", "0.5", "--drafting", "0.2"),
    ],
)
def test_methods_that_train_write_checkpoints_to_serve(flags: tuple[str, ...], tmp_path: Path) -> None:
    method, *rest = flags
    base, out = make_checkpoint(tmp_path / "base"), tmp_path / "out"
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox who could spin. " * 80)
    folders = [base, base, out] if method == "distill" else [base, out]
    few = ["--steps", "3", "--batch", "2", "--length", "32", "--text", tmp_path / "text.txt"]
    ran = CliRunner().invoke(compress, [str(each) for each in (method, *folders, *rest, *few)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    model = Served(out, 32)
    assert model.logprobs(model.read(torch.arange(2, 20))[0]).isfinite().all()
