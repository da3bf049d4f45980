"""The engine and device that a worker chooses, and the name of its model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.build import choose, runtimes
from services.worker.build.choose import resolve_engine
from services.worker.errors import CheckpointError
from services.worker.main import _startup
from services.worker.settings import WorkerSettings
from tests.exports import copy_of


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


def test_batches_of_a_decoder_are_smaller_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, tokens in (("BertModel", 32768), ("Qwen3Model", 8192)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert resolve_engine(WorkerSettings(), tmp_path, encodes=True).step_tokens == tokens
        assert resolve_engine(WorkerSettings(step_tokens=999), tmp_path, encodes=True).step_tokens == 999


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({"quantize": "int4"}, "openvino"),
        ({"quantize": "int8", "quantize_head": "int8"}, "openvino"),
        ({}, "torch"),
        ({"quantize": "fp8"}, "torch"),
        ({"quantize": "int4", "exact_inputs": True}, "torch"),
        ({"quantize": "int4", "deterministic": True}, "torch"),
        ({"quantize": "int4", "adapter_slots": 2}, "torch"),
        ({"quantize": "int4", "speculate": "ngram"}, "torch"),
        ({"quantize": "int4", "kv_dtype": "int8"}, "torch"),
    ],
)
def test_auto_chooses_openvino_for_rounded_weights_if_it_can_do_all_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path], asked: dict[str, Any], chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runtimes, "find_version", lambda package: "2026.4" if package == "openvino" else "")
    assert resolve_engine(WorkerSettings(**asked), checkpoint("llama")).engine == chosen
    assert resolve_engine(WorkerSettings(**asked), checkpoint("mixtral")).engine == "torch"
    monkeypatch.setattr(runtimes, "find_version", lambda _: "")
    assert resolve_engine(WorkerSettings(**asked), checkpoint("llama")).engine == "torch"


def test_auto_leaves_a_folder_with_an_export_to_torch(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """It reads the checkpoint, which it can round; openvino would read the export."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runtimes, "find_version", lambda _: "2026.4")
    folder = copy_of(checkpoint("llama"), tmp_path / "both")
    assert resolve_engine(WorkerSettings(quantize="int4"), folder).engine == "openvino"
    (folder / "model.onnx").touch()
    assert resolve_engine(WorkerSettings(quantize="int4"), folder).engine == "torch"


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_computes_an_export_that_comes_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    installed = {"onnxruntime", "openvino"}
    monkeypatch.setattr(choose, "find_spec", lambda module: module in installed)
    (tmp_path / "config.json").write_text("{}")
    chosen = []
    for added in ("model.pt2", "model.onnx", "model.safetensors"):
        (tmp_path / added).touch()
        chosen.append(resolve_engine(WorkerSettings(), tmp_path).engine)
    assert chosen == ["exported", "onnxruntime", "gpu" if gpu else "torch"]
    (tmp_path / "model.safetensors").unlink()
    assert resolve_engine(WorkerSettings(engine="exported"), tmp_path).engine == "exported"
    for removed, engine in (("onnxruntime", "openvino"), ("openvino", "exported")):
        installed.remove(removed)
        assert resolve_engine(WorkerSettings(), tmp_path).engine == engine
    (tmp_path / "model.pt2").unlink()  # The one that is not installed is named.
    assert resolve_engine(WorkerSettings(), tmp_path).engine == "onnxruntime"


def test_auto_chooses_the_gpu_in_deterministic_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for deterministic in (False, True):
        chosen = resolve_engine(WorkerSettings(engine="auto", deterministic=deterministic))
        assert (chosen.engine, chosen.dtype, chosen.deterministic) == ("gpu", "bfloat16", deterministic)
    assert resolve_engine(WorkerSettings(engine="torch", deterministic=True)).engine == "torch"
