"""Decoders that embed texts or score labels, against transformers: every family, every pooling, heads, int8."""

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification
from typer.testing import CliRunner

from services.worker.build.encoders.assemble import BuiltEncoder, build_encoder
from services.worker.build.export import export
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from services.worker.runners.base import TextTokens
from services.worker.runners.cpu.decoder_texts import DecoderTextRunner
from tests.checkpoints import BOS, CONTEXT, EOS, make_checkpoint
from tests.encoders import add_modules
from tests.worker.drive import prompt_of
from verify.cli import app

Floats = npt.NDArray[np.float32]
LENGTHS = (1, 17, 16, 64, 150, 3, 17)
TEXTS = [prompt_of(length, seed=number) for number, length in enumerate(LENGTHS)]
FAMILIES = ("llama-bias-rope", "mistral-window", "qwen2-window", "qwen3", "phi3", "gemma2", "gemma3", "gpt2")
LAST = {"pooling_mode": "lasttoken"}


def build(folder: Path, **options: Any) -> BuiltEncoder:
    given = {"engine": "torch", "step_tokens": sum(LENGTHS), **options}
    return build_encoder(folder, EngineOptions.model_validate(given), lambda *_: None)


def vectors(built: BuiltEncoder, texts: list[list[int]] = TEXTS) -> Floats:
    """Of all texts at once."""
    runner: Any = built.engine.runner
    assert isinstance(runner, DecoderTextRunner)
    before = runner.computed_tokens
    found: Floats = runner.collect(runner.launch([TextTokens(array("i", text)) for text in texts]))
    assert runner.computed_tokens - before == sum(map(len, texts)), "without padding"
    return found


@torch.inference_mode()
def expected(
    folder: Path, pool: Callable[[torch.Tensor], torch.Tensor] = lambda x: x[-1], texts: list[list[int]] = TEXTS
) -> Floats:
    """What transformers and the pooling make of each text alone."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    states = [model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in texts]
    return np.stack([pool(state).numpy() for state in states])


def assert_alike(own: Floats, reference: Floats) -> None:
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(reference, axis=1)
    assert ((own * reference).sum(1) / lengths).min() >= 0.99999
    np.testing.assert_allclose(own, reference, atol=5e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = add_modules(make_checkpoint(tmp_path, family), LAST)
    built, reference = build(folder), expected(folder)
    assert_alike(vectors(built), reference)
    assert_alike(vectors(built, TEXTS[3:4]), reference[3:4])  # alone as in a batch, in blocks that others wrote
    assert (built.most_length, built.settings.normalizes, built.computed_by) == (CONTEXT, True, "torch")


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_without_a_head_are_read(tmp_path: Path, family: str) -> None:
    """sentence-transformers stores the model alone: the first part of each tensor's name is missing."""
    folder = make_checkpoint(tmp_path / "whole", family)
    base = AutoModel.from_pretrained(folder, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert_alike(vectors(build(add_modules(tmp_path / "base", LAST))), expected(folder))


@pytest.mark.parametrize(
    ("mode", "pool"),
    [("mean", lambda x: x.mean(0)), ("cls", lambda x: x[0]), ("max", lambda x: x.amax(0))],
)
def test_each_pooling(tmp_path: Path, mode: str, pool: Callable[[torch.Tensor], torch.Tensor]) -> None:
    folder = add_modules(make_checkpoint(tmp_path, "qwen3"), {"pooling_mode": mode}, max_seq_length=200)
    built = build(folder)
    assert built.most_length == 200
    assert_alike(vectors(built), expected(folder, pool))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_scores_of_heads_are_those_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "scores")
    (tmp_path / "scores" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    built = build(tmp_path / "scores")
    with torch.inference_mode():
        reference = np.stack([model(input_ids=torch.tensor([text])).logits[0].numpy() for text in TEXTS])
    np.testing.assert_allclose(vectors(built), reference, atol=5e-4)
    assert built.engine.capabilities == {"rank" if labels == 1 else "classify"}
    assert built.config.head is not None
    assert len(built.config.head.labels) == labels


def test_int8_keeps_the_direction_of_vectors(tmp_path: Path) -> None:
    folder = add_modules(make_checkpoint(tmp_path, "qwen3"), LAST)
    own, reference = vectors(build(folder, quantize="int8")), expected(folder)
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(reference, axis=1)
    assert 0.99 <= ((own * reference).sum(1) / lengths).min() < 0.9999999


def test_a_long_step_does_not_choose_the_factors_of_long_texts(tmp_path: Path) -> None:
    """Longrope has other factors for texts beyond its original context, here 4,096; a batch may have as many tokens."""
    folder = add_modules(make_checkpoint(tmp_path, "phi3"), LAST)
    assert_alike(vectors(build(folder, step_tokens=8192)), expected(folder))


def test_verify_compares_rounded_vectors(tmp_path: Path) -> None:
    folder, result = add_modules(make_checkpoint(tmp_path / "tiny", "qwen3"), LAST), tmp_path / "result.json"
    done = CliRunner().invoke(app, [str(folder), "--quantize", "int8", "--json", str(result)])
    assert done.exit_code == 0, done.output
    (candidate,) = json.loads(result.read_text())["candidates"]
    assert 0.99 <= candidate["cosine"] <= candidate["cosine_mean"] < 1


def test_too_many_tokens_are_refused(tmp_path: Path) -> None:
    runner = build(add_modules(make_checkpoint(tmp_path), LAST), max_seq_length=100, step_tokens=100).engine.runner
    with pytest.raises(ValueError, match=r"^134 tokens, most are 100$"):
        runner.launch([TextTokens(array("i", [5] * 67))] * 2)


BOTH_WAYS = "a decoder whose tokens see later ones is not supported as an embedder"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "own code": ({"auto_map": {"AutoModel": "x.Y"}}, {}, "auto_map: the checkpoint brings code of its own, which "),
    "both ways": ({"use_bidirectional_attention": True}, {}, BOTH_WAYS),
    "not causal": ({"is_causal": False}, {}, BOTH_WAYS),
    "unknown": ({"architectures": ["T5Model"]}, {}, "T5Model is not supported as an embedder; supported are BertModel"),
    "experts": (
        {"architectures": ["MixtralModel"], "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
        r"mixtures of experts \(MixtralModel\) are not supported as embedders",
    ),
    "other weights": ({"architectures": ["Qwen3Model"]}, {}, "tensor model.layers.0.self_attn.k_norm.weight is "),
    "runtime": ({}, {"engine": "onnxruntime"}, "ENGINE=onnxruntime does not serve decoders as embedders: set ENGINE="),
    "deterministic": ({}, {"deterministic": True}, "an encoder cannot honour deterministic: "),
    "memory": ({}, {"step_tokens": 1 << 40}, "keys and values of 1099511627776 tokens take [0-9]+ MiB, [0-9]+ MiB are"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, options, reason = REFUSED[name]
    folder = add_modules(make_checkpoint(tmp_path), LAST)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=f"^{reason}"):
        build(folder, **options)


def test_an_end_token_that_only_transformers_would_add_is_refused(tmp_path: Path) -> None:
    folder = add_modules(make_checkpoint(tmp_path), LAST)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_eos_token": True}))
    with pytest.raises(
        CheckpointError, match=r"^tokenizer_config.json says add_eos_token, and tokenizer.json adds no "
    ):
        build(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [("<s>", BOS), ("</s>", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert build(folder).most_length == CONTEXT


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"^tensor score.weight is missing$"):
        build(folder)


def test_they_are_not_exported(tmp_path: Path) -> None:
    folder = add_modules(make_checkpoint(tmp_path / "model"), LAST)
    with pytest.raises(CheckpointError, match=r"^LlamaForCausalLM is no encoder; encoders are BertModel, "):
        export(folder, tmp_path / "out", "onnx", lambda *_: None)
