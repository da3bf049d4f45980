"""Each option is honoured or refused by name, whatever computes; of shared settings each model takes its own."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.worker.build import refused
from services.worker.build.choose import build_engine, resolve_engine
from services.worker.build.load import load_model
from services.worker.build.runtimes import refusal
from services.worker.errors import CheckpointError
from services.worker.options import RUNTIMES, EngineOptions
from services.worker.settings import WorkerSettings
from tests.encoders import make_encoder

CHANGED: dict[str, Any] = {
    "engine": "torch",
    "max_batch_size": 7,
    "max_seq_length": 48,
    "block_size": 8,
    "kv_bytes": 1 << 20,
    "kv_blocks": 64,
    "step_tokens": 96,
    "chunk_tokens": 9,
    "max_wait_ms": 2.0,
    "prefix_cache": False,
    "host_kv_bytes": 1 << 20,
    "deterministic": True,
    "dtype": "float16",
    "quantize": "int8",
    "quantize_head": "int8",
    "exact_inputs": True,
    "kv_dtype": "fp8",
    "kv_scales": "dynamic",
    "fetch_dtype": "fp8",
    "speculate": "ngram",
    "speculate_depth": 2,
    "draft_quantize": "int8",
    "adapter_slots": 2,
    "adapter_rank": 8,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "expert_parallel": True,
    "threads": 1,
    "paced_step_ms": 1.0,
    "paced_prefill_rate": 1.0,
    "paced_acceptance": 0.1,
}
"""A value of each option that is not its default."""
ALL = {"engine", "max_batch_size", "max_seq_length", "max_wait_ms", "step_tokens", "prefix_cache", "threads"}
_POOL = {"block_size", "kv_bytes", "kv_blocks", "chunk_tokens", "host_kv_bytes", "fetch_dtype"}
_RANKS = {"tensor_parallel", "pipeline_parallel", "expert_parallel"}
_STORED = {"deterministic", "dtype", "quantize", "kv_dtype", "kv_scales", "speculate", "adapter_slots"}
# `quantize_head` on a GPU, and what a grid of ranks cannot do, are refused where a checkpoint is read.
_DECODER = ALL | _POOL | _STORED | _RANKS | {"quantize_head"}
HONOURED = {
    "encoder": ALL | {"dtype", "quantize"},
    "torch": _DECODER | {"adapter_rank"},
    "gpu": _DECODER,
    **dict.fromkeys(RUNTIMES, ALL | _POOL),
    "openvino": ALL | _POOL | {"quantize", "quantize_head", "exact_inputs"},
    "compile": ALL | _POOL | {"dtype"},
}
"""By what computes: the options that have an effect there, or ask for nothing."""


def refusal_of(kind: str, **given: Any) -> str:
    """The refusal of these options by an encoder, or by this engine for a decoder."""
    if kind == "encoder":
        return refused.of_encoder(EngineOptions(**{"engine": "torch", **given}))
    options = EngineOptions(**{**given, "engine": kind})
    return refusal(options, kind) if kind in RUNTIMES else refused.of_torch(options)


def test_every_option_is_listed() -> None:
    assert CHANGED.keys() == EngineOptions.model_fields.keys()
    for name, value in CHANGED.items():
        assert value != EngineOptions.model_fields[name].default


@pytest.mark.parametrize("kind", HONOURED)
def test_each_option_is_honoured_or_refused_by_name(kind: str) -> None:
    assert refusal_of(kind) == ""
    for name, value in CHANGED.items():
        reason = refusal_of(kind, **{name: value})
        assert (reason == "") == (name in HONOURED[kind]), name
        assert reason == "" or reason.startswith(f"{name}: ")
        assert "\n" not in reason


@pytest.mark.parametrize("kind", HONOURED)
def test_defaults_that_are_given_are_honoured(kind: str) -> None:
    defaults = {name: field.default for name, field in EngineOptions.model_fields.items() if name != "engine"}
    assert refusal_of(kind, **defaults) == ""


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": "ngram", "speculate_depth": 2},
        {"speculate": "draft:fox", "draft_quantize": "int8"},
        {"adapter_slots": 2, "adapter_rank": 8},
    ],
)
def test_what_belongs_to_another_option_is_honoured_with_it(options: dict[str, Any]) -> None:
    assert refusal_of("gpu", **options) == ""


def test_defaults_of_engines_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=available: found)
        assert refused.of_encoder(resolve_engine(WorkerSettings(), encodes=True)) == ""
        assert refused.of_torch(resolve_engine(WorkerSettings())) == ""


def test_exact_inputs_are_a_reason_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what it computes with: they change no fingerprint."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    chosen = resolve_engine(WorkerSettings(exact_inputs=True))
    assert refused.of_torch(chosen) == ""
    assert chosen.numerics == resolve_engine(WorkerSettings()).numerics


def test_a_decoder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^ENGINE=torch cannot honour exact_inputs: it is for ENGINE=openvino"):
        build_engine(tmp_path, EngineOptions(engine="torch", exact_inputs=True), lambda *_: None)


def test_an_encoder_leaves_shared_settings_of_decoders_out(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "fox")
    given: dict[str, Any] = {"engine": "torch", "model": str(folder), "max_batch_size": 4}
    foreign: dict[str, Any] = {"kv_dtype": "fp8", "kv_scales": "dynamic", "exact_inputs": True, "speculate": "ngram"}
    with pytest.raises(CheckpointError, match=r"^an encoder cannot honour kv_dtype: "):
        load_model(WorkerSettings(**given, **foreign), "fox", lambda *_: None)
    with capture_logs() as lines:
        shared = load_model(WorkerSettings(**given, **foreign, settings_shared=True), "fox", lambda *_: None)
    assert [set(line["names"]) for line in lines if "left out" in line["event"]] == [foreign.keys()]
    alone = load_model(WorkerSettings(**given), "fox", lambda *_: None)
    assert shared.card.fingerprint == alone.card.fingerprint
    with pytest.raises(CheckpointError, match=r"^an encoder cannot honour deterministic: "):
        load_model(WorkerSettings(**given, deterministic=True, settings_shared=True), "fox", lambda *_: None)
