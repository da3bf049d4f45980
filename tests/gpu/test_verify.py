"""`weft verify --device cuda`: the GPU worker's own numbers, which are nearly the CPU worker's, and the same gates."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.checkpoints import DEMO
from verify.cli import app

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FEW = ("--windows", "3", "--length", "192", "--answers", "1", "--device", "cuda")


def verify(*arguments: object) -> tuple[int, str]:
    told = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    return told.exit_code, told.output


def test_the_base_is_itself_and_what_it_is_on_a_cpu(tmp_path: Path) -> None:
    gpu, cpu = tmp_path / "gpu.json", tmp_path / "cpu.json"
    itself = ("--max-kl", "1e-3", "--max-gain-error", "1e-3", "--min-top1", "0.98", "--min-cosine", "0.9999")
    code, told = verify(DEMO, DEMO, *FEW, *itself, "--json", gpu)
    assert code == 0, told
    assert verify(DEMO, DEMO, *FEW[:-1], "cpu", "--json", cpu)[0] == 0
    half, full = (json.loads(file.read_text())["base"]["perplexity"] for file in (gpu, cpu))
    assert half == pytest.approx(full, rel=0.01)


def test_a_layer_that_is_a_twentieth_too_loud_fails(tmp_path: Path) -> None:
    off = Path(shutil.copytree(DEMO, tmp_path / "off"))
    for file in off.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "layers.3." in name and name.endswith("proj.weight"):
                tensors[name] *= 1.05
        save_file(tensors, file, {"format": "pt"})
    code, told = verify(DEMO, off, *FEW)
    assert code == 1
    assert "gain error <= 0.015" in told
