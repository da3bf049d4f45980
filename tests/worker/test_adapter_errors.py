"""Adapters that cannot be served are refused in one line that names the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.build.adapters import AdapterReader
from services.worker.build.load import load_model
from services.worker.errors import CheckpointError
from services.worker.settings import WorkerSettings
from tests.checkpoints import pipe
from tests.worker.drive import built

Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}


def tensors(module: str = Q, rank: int = 4, inputs: int = 64, outputs: int = 64) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, inputs), f"{module}.lora_B.weight": torch.ones(outputs, rank)}


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def read(checkpoint: Callable[[str], Path]) -> AdapterReader:
    return built(checkpoint("llama"), kv_blocks=8, max_batch_size=2).read_adapter


def test_the_scale_is_in_the_fingerprint(read: AdapterReader, tmp_path: Path) -> None:
    plain, same = (read("a", str(write(tmp_path / name, {}, tensors()))) for name in "ab")
    scaled = read("a", str(write(tmp_path / "c", {"use_rslora": True}, tensors())))
    other = read("a", str(write(tmp_path / "d", {}, {name: 2 * each for name, each in tensors().items()})))
    assert plain.fingerprint == same.fingerprint
    assert len({plain.fingerprint, scaled.fingerprint, other.fingerprint}) == 3


REFUSED: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
    ({"use_dora": True}, tensors(), "adapter_config.json: use_dora is not supported"),
    ({"modules_to_save": ["lm_head"]}, tensors(), "adapter_config.json: modules_to_save is not supported"),
    ({"bias": "all"}, tensors(), "adapter_config.json: bias is not supported"),
    ({"rank_pattern": {"q_proj": 8}}, tensors(), "adapter_config.json: rank_pattern is not supported"),
    ({"a_new_setting": 1}, tensors(), "adapter_config.json: a_new_setting is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, tensors(), "init_lora_weights pissa_niter_4 is not supported"),
    ({"peft_type": "IA3"}, tensors(), "peft_type IA3 is not supported; supported is LORA"),
    ({"task_type": "SEQ_CLS"}, tensors(), "task_type SEQ_CLS is not supported; supported is CAUSAL_LM"),
    ({"r": 17}, tensors(rank=17), "r 17 is above this worker's largest rank, 16 (MAX_LORA_RANK)"),
    ({"r": 0}, tensors(), "r must be a positive integer"),
    ({"lora_alpha": "x"}, tensors(), "lora_alpha must be a finite number"),
    ({}, tensors(rank=5), "lora_A.weight of shape [5, 64] is not of rank 4"),
    ({}, tensors(inputs=32), "the adapter is of another base: model.layers.0.self_attn.q_proj has matrices [4, 32]"),
    ({}, tensors(outputs=65), "the adapter is of another base: model.layers.0.self_attn.q_proj"),
    ({}, {**tensors(), f"{Q}.lora_B.weight": torch.full((64, 4), 3e38)}, "q_proj has numbers that are not finite"),
    ({}, tensors(f"{Q[:-7]}.c_attn"), "the adapter changes model.layers.0.self_attn.c_attn, which is no product"),
    ({}, tensors(Q.replace("0", "3")), "the adapter changes model.layers.3.self_attn.q_proj, which is no product"),
    ({}, tensors("base_model.model.lm_head"), "the adapter changes lm_head, which is no product of this model's"),
    ({}, {f"{Q}.lora_A.weight": torch.ones(4, 64)}, "module model.layers.0.self_attn.q_proj has lora_A alone"),
    ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 8)}, "lora_embedding_A is not"),
    ({}, {}, "adapter_model.safetensors has no tensors"),
]


@pytest.mark.parametrize(("config", "weights", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], weights: dict[str, torch.Tensor], message: str, read: AdapterReader, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read("a", str(write(tmp_path / "adapter", config, weights)))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20),
            "truncated or not a safetensors",
        ),
        (pipe("adapter_model.safetensors"), "adapter_model.safetensors is not a regular file"),
        (pipe("adapter_config.json"), "adapter_config.json is not a regular file"),
    ],
)
def test_damaged_folders_are_refused(
    damage: Callable[[Path], object], message: str, read: AdapterReader, tmp_path: Path
) -> None:
    folder = write(tmp_path / "adapter", {}, tensors())
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read("a", str(folder))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("\0", "zero byte"),
        ("~nobody-has-this-name", "unknown user"),
        ("x" * 5000, "the worker sees no folder at xxx"),
        ("nowhere", "the worker sees no folder at nowhere"),
    ],
    ids=["zero byte", "home", "long", "missing"],
)
def test_names_that_no_folder_has_are_refused(place: str, message: str, read: AdapterReader) -> None:
    with pytest.raises(CheckpointError, match=message):
        read("a", place)


@pytest.mark.parametrize("options", [{"adapter_slots": 0}, {"engine": "paced"}], ids=str)
def test_a_worker_that_serves_no_adapters_refuses_all(
    options: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    read = built(checkpoint("llama"), kv_blocks=8, max_batch_size=2, **options).read_adapter
    with pytest.raises(CheckpointError, match="this worker serves no adapters"):
        read("a", str(write(tmp_path / "adapter", {}, tensors())))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"adapters": ["poems=a", "poems=b"]}, "poems is there twice"),
        ({"adapters": ["poems=a", "code=b"], "most_adapters": 1}, "2 adapters are too many: the limit is 1"),
        ({"adapters": ["poems"]}, "poems is not NAME=FOLDER"),
        ({"adapters": ["poems=nowhere"]}, "adapter poems: the worker sees no folder at nowhere"),
    ],
    ids=["twice", "many", "folder", "missing"],
)
def test_adapters_of_the_start_are_refused_by_name(
    settings: dict[str, Any], reason: str, checkpoint: Callable[[str], Path]
) -> None:
    chosen = WorkerSettings(model=str(checkpoint("llama")), kv_blocks=8, threads=1, **settings)
    with pytest.raises(CheckpointError, match=reason):
        load_model(chosen, "tiny", lambda *_: None)
