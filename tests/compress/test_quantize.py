"""Quantized checkpoints of `weft compress`: transformers and the worker read the same model from them."""

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from compress import text
from compress.base.network import group_for
from compress.cli import app
from compress.errors import CompressError
from compress.quantize.awq import Awq
from compress.quantize.gptq import Gptq
from compress.quantize.run import quantize
from services.worker.loader.config import load_config
from services.worker.models.config import count_embeddings
from tests.checkpoints import DEMO, SMALL_DEMO, Damage, make_checkpoint, pipe
from tests.compress.conftest import METHODS, Made
from verify.served import Served


@pytest.mark.parametrize("method", METHODS)
def test_transformers_and_the_worker_read_the_same_model(method: str, made: Made, base_of: Made) -> None:
    folder, ids = made(method), text.windows(text.read(text.HELD_OUT), base_of(method), 64, 1)[0]
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0].log_softmax(-1)
    model = Served(folder, 64)
    got = model.logprobs(model.read(ids)[0])
    divergence = F.kl_div(got, wanted, log_target=True, reduction="batchmean").item()
    # If inputs are rounded, another order of a sum may change a rounded value by one step.
    rounds_inputs = method in ("w8a8", "smoothquant") or method.startswith("fp8")
    # A CPU's products with INT4 are in bfloat16. A scale of a single linear that is off by 2% diverges by 3e-4.
    assert divergence < (2e-2 if rounds_inputs else 2.5e-4 if method == "gptq" else 1e-4), divergence


@pytest.mark.parametrize(("method", "share"), [("int8", 0.52), ("fp8", 0.52), ("awq", 0.42), ("gptq", 0.30)])
def test_the_files_are_smaller(method: str, share: float, made: Made) -> None:
    """All but the embedding, which no method rounds."""
    embedding = 2 * count_embeddings(load_config(SMALL_DEMO))
    sizes = [sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (made(method), SMALL_DEMO)]
    assert (sizes[0] - embedding) / (sizes[1] - embedding) < share


def test_narrow_networks_get_small_groups_and_wide_ones_the_default(tmp_path: Path) -> None:
    assert group_for(DEMO, None) == 32
    for asked, neurons, group in ((None, 5632, 128), (64, 5632, 64), (None, 5600, 32)):
        shape = {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": neurons}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
        assert group_for(tmp_path, asked) == group
    with pytest.raises(CompressError, match=r"groups of 100 do not divide .*\[384, 896\]"):
        group_for(DEMO, 100)
    odd = {"hidden_size": 144, "num_attention_heads": 1, "intermediate_size": 288}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **odd}))
    with pytest.raises(CompressError, match="groups of 9 inputs are odd"):
        group_for(tmp_path, 9)


def test_keys_and_values_get_scales(made: Made) -> None:
    index = json.loads((made("fp8-static") / "model.safetensors.index.json").read_text())["weight_map"]
    assert {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"} <= index.keys()
    assert "kv_cache_scheme" in json.loads((made("fp8-static") / "config.json").read_text())["quantization_config"]


class _Interrupted(Exception):
    """Raised in place of an interrupt."""


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    windows = text.windows(text.read(text.CALIBRATION), base, 64, 2)

    def layers_done(out: str, recipe: Gptq, windows: Tensor, stop_at: int = 9) -> list[int]:
        reported: list[int] = []

        def report(_: str, done: int, __: int) -> None:
            reported.append(done)
            if done == stop_at:
                raise _Interrupted

        with contextlib.suppress(_Interrupted):
            quantize(base, tmp_path / out, recipe, windows, report)
        return reported

    assert layers_done("whole", Gptq(32), windows) == [0, 1, 2, 3]
    assert layers_done("parts", Gptq(32), windows, stop_at=2) == [0, 1, 2]
    assert not (tmp_path / "parts").exists()
    assert layers_done("parts", Gptq(32), windows) == [2, 3]
    assert not (tmp_path / "parts.partial").exists()
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes(), file.name
    layers_done("other", Gptq(32), windows, stop_at=2)
    assert layers_done("other", Gptq(16), windows, stop_at=2)[0] == 0, "other settings start a new run"
    assert layers_done("other", Gptq(16), windows.flip(0), stop_at=2)[0] == 0, "another text starts a new run"
    make_checkpoint(base, seed=1)
    assert layers_done("other", Gptq(16), windows.flip(0))[0] == 0, "another base of the same name starts a new run"


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def device(name: str) -> Damage:
    """Replaces a file by a device, which has no end."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/null")

    return damage


def written(name: str, content: str) -> Damage:
    """Replaces the content of a file."""
    return lambda folder: (folder / name).write_text(content)


def typed(dtype: torch.dtype) -> Damage:
    """Converts a weight to another type, as in a quantized checkpoint."""
    return lambda folder: changed(folder, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut, "model.safetensors cannot be read: "),
        (pipe("model.safetensors"), "model.safetensors is not a regular file"),
        (pipe("config.json"), "config.json is not a regular file"),
        (pipe("chat_template.jinja"), "chat_template.jinja is not a regular file"),
        (device("generation_config.json"), "generation_config.json is not a regular file"),
        (written("generation_config.json", "{"), "generation_config.json cannot be read: JSONDecodeError"),
        (written("generation_config.json", "[]"), "generation_config.json is not an object"),
        (written("tokenizer_config.json", "{"), "tokenizer_config.json cannot be read: JSONDecodeError"),
        (lambda base: (base / "config.json").unlink(), "config.json is missing"),
        (typed(torch.int32), f"tensor {DOWN} has type I32 and no quantization_config; plain are F32, F16, BF16"),
        (typed(torch.float8_e4m3fn), f"tensor {DOWN} has type F8_E4M3 and no quantization_config"),
        (lambda base: changed(base, lambda t: t.update({"a\nb": torch.ones(2)})), "tensor a b is not part of"),
        (lambda base: changed(base, lambda t: t.pop(DOWN)), f"tensor {DOWN} is missing"),
        (lambda base: changed(base, lambda t: t.update({DOWN: t[DOWN][1:].clone()})), f"{DOWN} has not the shape"),
        (lambda base: changed(base, lambda t: t.update(more=torch.ones(2))), "more is not part of this architecture"),
        (lambda base: changed(base, lambda t: t[DOWN][0].fill_(torch.nan)), f"{DOWN} holds numbers that are not fin"),
        (lambda base: (base / "config.json").write_text("[]"), "config.json is not an object"),
        (lambda base: (base / "config.json").write_text("[" * 10**6), "config.json cannot be read: RecursionError"),
        (lambda base: configured(base, hidden_size="64"), "hidden_size must be a positive whole number"),
        (lambda base: configured(base, num_attention_heads=0), "num_attention_heads must be a positive whole number"),
        (
            lambda base: configured(base, num_hidden_layers=10**6),
            "config.json speaks of 18,432,020,480 numbers or more",
        ),
        (lambda base: configured(base, hidden_act="zzz"), "cannot be loaded: 'zzz'"),
        (lambda base: configured(base, rope_parameters="x"), "cannot be loaded: Validation error"),
        (lambda base: configured(base, model_type="gemma"), "model_type gemma is not supported"),
        (lambda base: configured(base, dtype="auto"), "dtype auto is not supported"),
    ],
)
def test_an_incomplete_base_is_never_compressed(damage: Damage, complaint: str, tmp_path: Path) -> None:
    """Transformers would fill missing tensors with random values, and block at a pipe without a writer."""
    base = make_checkpoint(tmp_path / "base")
    damage(base)
    result = CliRunner().invoke(app, ["int8", str(base), str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 1
    assert complaint in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_short_text_and_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"Once upon a time. " * 1000)[:40])
    with pytest.raises(CompressError, match=r"cut\.txt\.gz cannot be read"):
        text.read(tmp_path / "cut.txt.gz")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CompressError, match=r"tokenizer\.json cannot be read"):
        text.windows(["Once"], tmp_path, 64)


def test_windows_are_of_whole_texts_whatever_the_tokenizer_cuts_and_fills_up(tmp_path: Path) -> None:
    """Those of sentence-transformers do, and those that were saved in training."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.enable_truncation(40)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = text.read(text.CALIBRATION)
    assert torch.equal(text.windows(texts, tmp_path, 64, 4), text.windows(texts, DEMO, 64, 4))


def test_a_model_that_cannot_be_compressed_is_refused_in_one_line(tmp_path: Path, made: Made) -> None:
    with pytest.raises(CompressError, match="quantized already"):
        quantize(made("int8"), tmp_path / "again", Awq(), None, lambda *_: None)
    with pytest.raises(CompressError, match="exists"):
        quantize(DEMO, made("int8"), Awq(), None, lambda *_: None)
    with pytest.raises(CompressError, match=r"has no tokenizer\.json"):
        text.windows(["Once"], tmp_path, 64)
    with pytest.raises(CompressError, match="2 tokens of text make 0 windows of 64; 2 are needed"):
        text.windows([" a"], DEMO, 64, 2)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(CompressError, match="no text"):
        text.read(tmp_path / "empty.txt")


def test_a_base_with_non_finite_outputs_is_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    configured(base, rope_parameters={"rope_type": "default", "rope_theta": float("nan")})
    windows = text.windows(text.read(text.CALIBRATION), base, 32, 2)
    with pytest.raises(CompressError, match="computes numbers that are not finite"):
        quantize(base, tmp_path / "out", Gptq(32), windows, lambda *_: None)
