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


def test_auto_takes_the_gpu_in_deterministic_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for deterministic in (False, True):
        chosen = suited(WorkerSettings(engine="auto", deterministic=deterministic))
        assert (chosen.engine, chosen.dtype, chosen.deterministic) == ("gpu", "bfloat16", deterministic)
    assert suited(WorkerSettings(engine="torch", deterministic=True)).engine == "torch"
