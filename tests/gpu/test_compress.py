"""`weft compress` writes the same checkpoints on a GPU as on a CPU."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from compress import text
from compress.base import network
from compress.cli import app
from tests.checkpoints import DEMO
from verify.served import Served

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FEW = ("--windows", "6", "--length", "128")
UNHEALED = ("--steps", "0", "--length", "128")
METHODS = {
    "fp8": ("fp8", "--granularity", "tensor", "--static", "--kv", *FEW),
    "awq": ("awq", *FEW),
    "awq-nearest": ("awq", "--no-compensate", *FEW),
    "gptq": ("gptq", *FEW),
    "gptq-act-order": ("gptq", "--act-order", "--no-symmetric", *FEW),
    "smoothquant": ("smoothquant", *FEW),
    "qat": ("qat", *UNHEALED),
    "prune": ("prune", "--pattern", "2:4", *UNHEALED),
    "shrink": ("shrink", "--layers", "1", "--kv-heads", "1", *UNHEALED),
}


def made(method: str, out: Path) -> Path:
    name, *flags = METHODS[method]
    result = CliRunner().invoke(app, [name, str(DEMO), str(out), *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


COMPENSATED = ("awq", "gptq", "gptq-act-order", "qat")
"""Columns make up for those before them: moments that differ by a millionth lead to other roundings, which are as far
from the first ones as from the base, and just as good."""


# Inductor of torch 2.11 imports a module of torch that warns.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
def test_gpu_and_cpu_write_the_same_checkpoint(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = allocations()
    gpu = made(method, tmp_path / "gpu")
    assert allocations() > before
    monkeypatch.setattr(network, "compute_device", lambda: torch.device("cpu"))
    cpu = made(method, tmp_path / "cpu")
    ids = text.windows(text.read(text.HELD_OUT), DEMO, 128, 1)[0]
    actual, wanted, base = (
        model.logprobs(model.read(ids)[0]) for model in (Served(each, 128) for each in (gpu, cpu, DEMO))
    )
    if method in COMPENSATED:
        assert divergence(actual, base) < 1.25 * divergence(wanted, base)
    else:
        assert divergence(actual, wanted) < 5e-3


def allocations() -> int:
    """How often memory of the GPU was allocated in this process."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def divergence(actual: Tensor, wanted: Tensor) -> float:
    """Mean KL of log-probabilities [T, V], nats."""
    return F.kl_div(actual, wanted, log_target=True, reduction="batchmean").item()
