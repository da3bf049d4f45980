"""Compression that trains: pruned and shrunk networks, students, rounded weights, and resumed runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import text
from compress.base.columns import keep_columns
from compress.base.network import load
from compress.choices import Pattern
from compress.errors import CompressError
from compress.prune.shrink import Cut, shrink
from compress.prune.sparse import PruneScore, prune
from compress.quantize.qat import qat
from compress.training.distill import distill
from compress.training.run import Plan, logits, rejection
from services.worker.loader.config import load_config
from tests.checkpoints import Shape, make_checkpoint
from verify.gates import LIMITS
from verify.rows import compare_rows
from verify.served import Served

PLAN = Plan(steps=30, batch=4, learning_rate=2e-3, warmup=3)


def quiet(*_: object) -> None:
    """Ignores progress."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def windows(base: Path) -> Tensor:
    return text.windows(text.read(text.CALIBRATION), base, 32, 48)


def divergence(base: Path, candidate: Path, windows_WT: Tensor) -> float:
    """Mean KL divergence from the base in nats; both are served by the worker."""
    one, other = Served(base, 64), Served(candidate, 64)
    total = 0.0
    for ids in windows_WT[:8]:
        wanted, got = one.logprobs(one.read(ids)[0]), other.logprobs(other.read(ids)[0])
        total += torch.nn.functional.kl_div(got, wanted, log_target=True, reduction="batchmean").item()
    return total / 8


@pytest.mark.parametrize("wanda", [True, False])
def test_after_2_of_4_pruning_the_rest_is_trained(base: Path, windows: Tensor, tmp_path: Path, wanda: bool) -> None:
    score = PruneScore(pattern=Pattern.TWO_OF_FOUR, wanda=wanda)
    prune(base, tmp_path / "hurt", windows, score, Plan(steps=0), quiet)
    prune(base, tmp_path / "healed", windows, score, PLAN, quiet)
    for folder in (tmp_path / "hurt", tmp_path / "healed"):
        weights = load_file(next(folder.glob("model-00001-*")))
        zeros = (weights["model.layers.0.mlp.down_proj.weight"].view(-1, 4) == 0).sum(1)
        assert zeros.min() >= 2
        assert zeros.float().mean() < 2.1
    assert divergence(base, tmp_path / "healed", windows) < 0.8 * divergence(base, tmp_path / "hurt", windows)


def test_a_2_of_4_pattern_without_matching_layers_is_refused(windows: Tensor, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", Shape("llama", {"intermediate_size": 98}))
    with pytest.raises(CompressError, match="inputs are multiples of 4"):
        prune(base, tmp_path / "out", windows, PruneScore(pattern=Pattern.TWO_OF_FOUR), Plan(steps=0), quiet)


def test_pruning_by_inputs_loses_less_than_pruning_by_size(base: Path, windows: Tensor, tmp_path: Path) -> None:
    found = {}
    for wanda in (True, False):
        out = tmp_path / f"{wanda}"
        prune(base, out, windows, PruneScore(0.4, wanda=wanda, compensate=False), Plan(steps=0), quiet)
        found[wanda] = divergence(base, out, windows)
    assert found[True] < found[False]


def test_remaining_weights_compensate_for_pruned_ones(base: Path, windows: Tensor, tmp_path: Path) -> None:
    found = {}
    for compensate in (True, False):
        out = tmp_path / f"{compensate}"
        prune(base, out, windows, PruneScore(0.5, compensate=compensate), Plan(steps=0), quiet)
        weights = load_file(next(out.glob("model-00002-*")))
        assert (weights["model.layers.1.mlp.up_proj.weight"] == 0).float().mean() == 0.5
        found[compensate] = divergence(base, out, windows)
    assert found[True] < 0.8 * found[False]


def test_a_shrunk_network_is_a_standard_smaller_one(base: Path, windows: Tensor, tmp_path: Path) -> None:
    cut = Cut(neurons=0.34, kv_heads=1, layers=1)
    shrink(base, tmp_path / "hurt", windows, cut, Plan(steps=0), quiet)
    shrink(base, tmp_path / "healed", windows, cut, PLAN, quiet)
    config = json.loads((tmp_path / "healed" / "config.json").read_text())
    named = ("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert [config[name] for name in named] == [2, 64, 2, 1]
    assert divergence(base, tmp_path / "healed", windows) < 0.8 * divergence(base, tmp_path / "hurt", windows)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "healed", dtype=torch.float32)
    ours = Served(tmp_path / "healed", 64)
    with torch.no_grad():
        wanted = theirs(windows[:1]).logits[0].log_softmax(-1)
    assert torch.allclose(ours.logprobs(ours.read(windows[0])[0]), wanted, atol=1e-4)


def test_remaining_inputs_take_over_the_removed_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 12, generator=generator)
    inputs[:, 8:] = inputs[:, :4] + 0.1 * inputs[:, 8:]
    weight, stays = torch.randn(5, 12, generator=generator), torch.arange(8)
    wanted = inputs @ weight.T
    cut = inputs[:, stays] @ weight[:, stays].T - wanted
    fitted = inputs[:, stays] @ keep_columns(weight, inputs.T @ inputs / 400, stays).T - wanted
    assert fitted.norm() < 0.15 * cut.norm()


@pytest.mark.parametrize(("share", "left"), [(0.99, 32), (0.0, 80)])
def test_the_requested_share_of_neurons_is_removed(windows: Tensor, tmp_path: Path, share: float, left: int) -> None:
    """The number of remaining neurons is a multiple of 32 if any are removed, and never zero."""
    base = make_checkpoint(tmp_path / "base", Shape("llama", {"intermediate_size": 80}))
    shrink(base, tmp_path / "out", windows[:2], Cut(neurons=share), Plan(steps=0), quiet)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"] == left


def test_layers_that_stay_keep_their_windows(windows: Tensor, tmp_path: Path) -> None:
    """Also where config.json names the first layer with a window, and not the kind of each."""
    settings = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 4}
    base = make_checkpoint(tmp_path / "base", Shape("qwen2", settings))
    config = json.loads((base / "config.json").read_text())
    config.pop("layer_types", None)
    (base / "config.json").write_text(json.dumps(config))
    weights = load_file(base / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # The first layer adds nothing: it is the one that is removed.
        weights[f"model.layers.0.{name}.weight"].zero_()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    shrink(base, tmp_path / "out", windows[:2], Cut(neurons=0, layers=1), Plan(steps=0), quiet)
    assert load_config(base).windows == (None, None, 16, 16)
    assert load_config(tmp_path / "out").windows == (None, 16, 16)


def test_removing_everything_is_refused(base: Path, windows: Tensor, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="nothing would be left"):
        shrink(base, tmp_path / "out", windows, Cut(layers=3), PLAN, quiet)


def test_trained_rounding_is_better_than_rounding(base: Path, windows: Tensor, tmp_path: Path) -> None:
    rounded, trained = tmp_path / "rounded", tmp_path / "trained"
    qat(base, rounded, windows, Plan(steps=0), quiet, group=32)
    qat(base, trained, windows, Plan(steps=40, batch=4, learning_rate=2e-4, warmup=4), quiet, group=32)
    assert json.loads((trained / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert divergence(base, trained, windows) < 0.9 * divergence(base, rounded, windows)
    rows = compare_rows(Served(base, 64), Served(trained, 64), quiet)
    assert rows is not None
    assert rows.error < LIMITS["quantized"]["row_error"], rows.worst
    assert rows.gain_error < LIMITS["quantized"]["row_gain_error"], rows.worst


def test_a_student_learns_and_an_interrupted_run_is_resumed(base: Path, windows: Tensor, tmp_path: Path) -> None:
    student = make_checkpoint(tmp_path / "student", Shape("llama", {"num_hidden_layers": 1}), seed=5)
    reported: list[int] = []

    def stop_half_way(_: str, done: int, __: int) -> None:
        if done == 16:
            raise KeyboardInterrupt

    distill(base, student, tmp_path / "whole", windows, PLAN, quiet, fresh=True)
    with pytest.raises(KeyboardInterrupt):
        distill(base, student, tmp_path / "parts", windows, PLAN, stop_half_way, fresh=True)
    distill(base, student, tmp_path / "parts", windows, PLAN, lambda _, done, __: reported.append(done), fresh=True)
    assert reported[0] == 16
    assert divergence(base, tmp_path / "whole", windows) < divergence(base, student, windows)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes()


def test_a_student_learns_to_draft_what_its_teacher_accepts(base: Path, windows: Tensor, tmp_path: Path) -> None:
    student = make_checkpoint(tmp_path / "student", Shape("llama", {"num_hidden_layers": 1}), seed=5)
    distill(base, student, tmp_path / "out", windows, PLAN, quiet, drafting=1.0)

    def rejected(folder: Path) -> float:
        with torch.no_grad():
            return rejection(logits(load(folder), windows[:8]), logits(load(base), windows[:8])).item()

    assert rejected(base) < 1e-6
    assert rejected(tmp_path / "out") < 0.9 * rejected(student)


def test_a_student_with_another_vocabulary_is_refused(base: Path, windows: Tensor, tmp_path: Path) -> None:
    student = make_checkpoint(tmp_path / "student", Shape("llama", {"vocab_size": 400}))
    with pytest.raises(CompressError, match="different vocabularies"):
        distill(base, student, tmp_path / "out", windows, PLAN, quiet)
