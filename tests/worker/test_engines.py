"""The engine and device that a worker chooses, and the name of its model."""

from pathlib import Path

import pytest
import torch

from services.worker.build.choose import resolve_engine
from services.worker.errors import CheckpointError
from services.worker.main import _startup
from services.worker.settings import WorkerSettings


def test_a_model_is_named_after_its_folder_or_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "latest").symlink_to("v3")
    for path, name in ((f"{tmp_path}/latest", "latest"), (f"{tmp_path}/v3/../latest/", "latest"), ("org/fox", "fox")):
        assert _startup(WorkerSettings(model=path)).model == name


def test_auto_chooses_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_engine(WorkerSettings(engine="auto")).engine == "torch"
    with pytest.raises(CheckpointError, match="ENGINE=gpu needs a GPU"):
        resolve_engine(WorkerSettings(engine="gpu"))


def test_auto_chooses_the_gpu_in_deterministic_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for deterministic in (False, True):
        chosen = resolve_engine(WorkerSettings(engine="auto", deterministic=deterministic))
        assert (chosen.engine, chosen.dtype, chosen.deterministic) == ("gpu", "bfloat16", deterministic)
    assert resolve_engine(WorkerSettings(engine="torch", deterministic=True)).engine == "torch"
