"""The limits of `weft verify`: correct checkpoints pass, and one wrong scale fails."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from compress.quantize import layout
from compress.quantize.rounding import round_int8
from tests.checkpoints import DEMO, SMALL_DEMO, make_checkpoint
from tests.compress.conftest import METHODS, Made
from tests.draft_heads import make_heads
from verify.cli import app

RowDamage = Callable[[dict[str, Tensor]], object]
FEW = ("--windows", "3", "--length", "192", "--answers", "1")
LEAST = ("--windows", "1", "--length", "96", "--answers", "0")


def verify(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def tampered(folder: Path, to: Path, linear: str, factor: float) -> Path:
    """A copy with the scales of the second layer's linears of this name multiplied."""
    shutil.copytree(folder, to)
    (shard,) = to.glob("model-00002-of-*.safetensors")
    tensors = load_file(shard)
    names = [name for name in tensors if name.endswith("weight_scale") and linear in name]
    assert names
    for name in names:
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    save_file(tensors, shard, {"format": "pt"})
    return to


def test_correct_quantizations_pass_in_one_report(made: Made, tmp_path: Path) -> None:
    html, result = tmp_path / "new" / "report.html", tmp_path / "result.json"
    folders = [made(method) for method in ("int8", "int8-tensor", "w8a8", "fp8", "awq")]
    code, output = verify(SMALL_DEMO, *folders, *FEW, "--json", result, "--html", html)
    assert code == 0, output
    figures = json.loads(result.read_text())["candidates"]
    assert [each["name"] for each in figures] == [folder.name for folder in folders]
    assert all(each["cosine"] >= 0.99 and each["gain_error"] < 0.01 for each in figures), output
    assert all(0.85 < each["accepted"] < 1 for each in figures), output
    per_channel, per_tensor = figures[:2]
    assert per_channel["kl"] < per_tensor["kl"]
    page = html.read_text()
    assert page.count("<svg") >= 9
    assert all(folder.name in page for folder in folders)


@pytest.mark.parametrize(
    ("method", "linear"), [("int8", ""), ("fp8", ""), ("awq", ""), ("int8", "k_proj"), ("awq", "up_proj")]
)
def test_a_layer_whose_scales_are_off_by_a_twentieth_fails(
    method: str, linear: str, made: Made, tmp_path: Path
) -> None:
    code, output = verify(SMALL_DEMO, tampered(made(method), tmp_path / "off", linear, 1.05), *FEW)
    assert code == 1
    assert "gain error <= 0.015" in output


@pytest.mark.parametrize(("factor", "error"), [(1.0, 0.0), (1.05, 0.05)])
def test_a_head_with_wrong_scales_is_found_too(factor: float, error: float, tmp_path: Path) -> None:
    """Outputs hardly change: hidden states end before the head, and the most likely token stays the same."""
    base = make_checkpoint(tmp_path / "base")
    candidate, result = Path(shutil.copytree(base, tmp_path / "candidate")), tmp_path / "result.json"
    tensors = load_file(base / "model.safetensors")
    rounded = round_int8(tensors.pop("lm_head.weight"))
    made = {"lm_head.weight": rounded.values, "lm_head.weight_scale": rounded.scale * factor}
    save_file(tensors | made, candidate / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    settings = layout.int8(per_tensor=False, dynamic=False).quantization_config() | {"ignore": ["re:.*_proj"]}
    (candidate / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    code, output = verify(base, candidate, *LEAST, "--json", result)
    (figures,) = json.loads(result.read_text())["candidates"]
    assert figures["gain_error"] == pytest.approx(error, abs=0.005)
    assert code == (1 if error else 0), output


LINEAR = "model.layers.1.mlp.up_proj"
ROW = 77


def scaled_row(factor: float) -> RowDamage:
    """Multiplies the scale, or all scales, of one row."""
    return lambda parts: parts["weight_scale"][ROW].mul_(factor)


def exchange_rows(parts: dict[str, Tensor]) -> None:
    """Exchanges two rows with their scales and zeros. Eight int4 zeros share a word, so the rows are 8 apart."""
    for name, part in parts.items():
        if name == "weight_zero_point":
            part[[3, 5]] = part[[5, 3]]
        elif name != "weight_shape":
            rows, others = list(range(24, 32)), list(range(40, 48))
            part.view(torch.uint8)[[*rows, *others]] = part.view(torch.uint8)[[*others, *rows]]


def double_one_group(parts: dict[str, Tensor]) -> None:
    """Doubles the scale of one group, which is 32 inputs of a row."""
    parts["weight_scale"][ROW, 5] *= 2


def damaged(folder: Path, to: Path, damage: RowDamage) -> Path:
    """A copy with one linear's stored tensors damaged."""
    shutil.copytree(folder, to)
    (shard,) = to.glob("model-00002-of-*.safetensors")
    tensors = load_file(shard)
    parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{LINEAR}.")}
    assert "weight_scale" in parts
    damage(parts)
    save_file(tensors, shard, {"format": "pt"})
    return to


@pytest.mark.parametrize("method", ["int8", "fp8", "awq", "gptq"])
@pytest.mark.parametrize(
    ("damage", "worst"),
    [
        pytest.param(scaled_row(1.5), f"row {ROW}:", id="half-again"),
        pytest.param(scaled_row(0.0), f"row {ROW}:", id="zero"),
        pytest.param(exchange_rows, "row ", id="exchanged"),
    ],
)
def test_one_damaged_row_fails_and_is_named(
    method: str, damage: RowDamage, worst: str, made: Made, tmp_path: Path
) -> None:
    code, output = verify(SMALL_DEMO, damaged(made(method), tmp_path / "off", damage), *LEAST)
    assert code == 1, output
    assert f"layer 1 mlp.up_proj {worst}" in output


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_one_group_of_double_scale_fails_and_is_named(method: str, made: Made, tmp_path: Path) -> None:
    code, output = verify(SMALL_DEMO, damaged(made(method), tmp_path / "off", double_one_group), *LEAST)
    assert code == 1, output
    assert f"layer 1 mlp.up_proj row {ROW} group 5:" in output


@pytest.mark.parametrize("method", METHODS)
def test_the_rows_of_every_correct_method_pass(method: str, made: Made, base_of: Made, tmp_path: Path) -> None:
    """AWQ and SmoothQuant move factors from layer to layer; GPTQ and AWQ move errors from column to column."""
    result = tmp_path / "result.json"
    verify(base_of(method), made(method), *LEAST, "--json", result)
    (figures,) = json.loads(result.read_text())["candidates"]
    assert {gate["figure"]: gate["holds"] for gate in figures["gates"]}.items() >= {
        ("row_error", True),
        ("row_gain_error", True),
    }
    assert 0 < figures["row_error"] < 3
    assert figures["row_gain_error"] < 0.08


def test_the_base_compared_with_itself_passes() -> None:
    code, output = verify(SMALL_DEMO, SMALL_DEMO, *FEW, "--max-kl", "0", "--max-gain-error", "0", "--min-top1", "1")
    assert code == 0, output


def test_limits_may_be_set_by_flags(made: Made) -> None:
    assert verify(SMALL_DEMO, made("int8"), *LEAST, "--max-kl", "1e-9")[0] == 1
    assert verify(DEMO, SMALL_DEMO, *LEAST, "--kind", "changed")[0] == 0
    assert verify(DEMO, SMALL_DEMO, *LEAST)[0] == 1


def test_an_unreadable_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    code, output = verify(SMALL_DEMO, tmp_path, *FEW)
    assert (code, output.count("\n")) == (2, 1)
    assert "config.json is missing" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_refusal_names_the_checkpoint(tmp_path: Path) -> None:
    base, candidate = make_checkpoint(tmp_path / "base"), make_checkpoint(tmp_path / "candidate")
    (candidate / "config.json").write_text("{")
    output = CliRunner().invoke(app, [str(base), str(candidate), "--length", "32"], catch_exceptions=False)
    assert output.exit_code == 2
    assert output.output == f"weft verify: {candidate}: config.json cannot be read: JSONDecodeError\n"


def test_without_a_gpu_its_device_is_not_queried() -> None:
    code, output = verify(SMALL_DEMO, SMALL_DEMO, *LEAST, "--device", "cuda")
    assert (code, output.count("\n")) == (2, 1)
    assert "needs a GPU" in output


def test_another_vocabulary_is_refused_in_one_line(tmp_path: Path) -> None:
    code, output = verify(SMALL_DEMO, make_checkpoint(tmp_path / "other"), *FEW)
    assert (code, output.count("\n")) == (2, 1)
    assert "they do not compare" in output


def test_drafts_are_measured_by_depth(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama-damped")
    good, bad = make_heads(tmp_path / "good", base, noise=0.0), make_heads(tmp_path / "bad", base, noise=1.0)
    result, html = tmp_path / "result.json", tmp_path / "report.html"
    drafts = [f"draft:{base}", f"heads:{good}", f"heads:{bad}"]
    asked = [part for draft in drafts for part in ("--draft", draft)]
    code, output = verify(base, *asked, "--depth", 3, "--windows", 4, "--json", result, "--html", html)
    assert code == 0, output
    found = json.loads(result.read_text())["drafts"]
    assert [(each["name"], each["temperature"]) for each in found] == [(name, t) for name in drafts for t in (0, 1)]
    assert all(len(each["by_depth"]) == 3 for each in found)
    itself, right, wrong = found[0], found[2], found[4]
    assert itself["by_depth"] == [1.0, 1.0, 1.0]
    assert itself["accepted_length"] > 3.5, "the last step of an answer has room for less"
    assert right["accepted_length"] > 1.3
    assert right["by_depth"][0] > right["by_depth"][2] > wrong["by_depth"][0]
    assert "guess 3" in output
    assert "Guesses that the base accepts" in html.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name a checkpoint, or a --draft"),
        (("--draft", "ngram"), "neither draft:MODEL nor heads:PATH"),
        (("--draft", "heads:/nowhere"), "no folder of draft heads at /nowhere"),
    ],
)
def test_what_is_no_draft_is_refused(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, output = verify(make_checkpoint(tmp_path / "base"), *flags, "--windows", 1, "--length", 32)
    assert code == 2
    assert message in output
