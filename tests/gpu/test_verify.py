"""`weft verify --device cuda` compares on the GPU worker: figures close to the CPU worker's, and the same limits."""

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
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_base_passes_with_the_figures_of_a_cpu(tmp_path: Path) -> None:
    gpu, cpu = tmp_path / "gpu.json", tmp_path / "cpu.json"
    itself = ("--max-kl", "1e-3", "--max-gain-error", "1e-3", "--min-top1", "0.98", "--min-cosine", "0.9999")
    code, output = verify(DEMO, DEMO, *FEW, *itself, "--json", gpu)
    assert code == 0, output
    assert verify(DEMO, DEMO, *FEW[:-1], "cpu", "--json", cpu)[0] == 0
    half, full = (json.loads(file.read_text())["base"]["perplexity"] for file in (gpu, cpu))
    assert half == pytest.approx(full, rel=0.01)


def test_a_layer_with_scales_off_by_a_twentieth_fails(tmp_path: Path) -> None:
    off = Path(shutil.copytree(DEMO, tmp_path / "off"))
    for file in off.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "layers.3." in name and name.endswith("proj.weight"):
                tensors[name] *= 1.05
        save_file(tensors, file, {"format": "pt"})
    code, output = verify(DEMO, off, *FEW)
    assert code == 1
    assert "gain error <= 0.015" in output
