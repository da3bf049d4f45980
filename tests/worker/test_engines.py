"""Which engine a worker takes, and what it refuses by name."""

import pytest
import torch

from services.worker.config import CheckpointError
from services.worker.engines import suited
from services.worker.settings import WorkerSettings


def test_auto_takes_the_processor_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suited(WorkerSettings(engine="auto")).engine == "torch"
    with pytest.raises(CheckpointError, match="ENGINE=gpu needs a GPU"):
        suited(WorkerSettings(engine="gpu"))


def test_the_gpu_refuses_the_deterministic_mode_that_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert suited(WorkerSettings(engine="auto")).engine == "gpu"
    with pytest.raises(CheckpointError, match="deterministic mode is not offered on the GPU"):
        suited(WorkerSettings(engine="auto", deterministic=True))
    assert suited(WorkerSettings(engine="torch", deterministic=True)).engine == "torch"
