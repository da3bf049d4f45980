"""Properties of GPT-2 checkpoints: names with and without a prefix, stored masks, transposed weights, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import compress.cli
import verify.cli
from kernels import quantized_weights
from services.worker.errors import CheckpointError
from services.worker.loader.config import load_config
from services.worker.models.config import LearnedPositions, count_embeddings, count_parameters
from tests.checkpoints import CONTEXT, VOCAB, Shape, make_checkpoint
from tests.served import assert_served_like, engine_of, tolerance_of
from tests.worker.drive import built, job, prompt_of, run

PROMPT = prompt_of(21, vocab=VOCAB)
_LINEARS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A GPT-2 in one file, with widths that 4-bit formats can divide into groups."""
    return make_checkpoint(tmp_path / "plain", Shape("gpt2"))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Changes the weights of a checkpoint with one file."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, {"format": "pt"})
    return folder


def greedy(folder: Path, **options: Any) -> tuple[list[int], list[float | None]]:
    answer = run(engine_of(folder, **options), job(0, PROMPT, max_tokens=24, logprobs=0, ignore_eos=True))[0]
    return answer.tokens, answer.logprobs


def test_names_without_a_prefix_and_stored_masks_change_nothing(plain: Path) -> None:
    expected, parameters = greedy(plain), built(plain, kv_blocks=8).parameters

    def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT).tril() for layer in range(3)}
        masks["h.0.attn.bias"] = masks["h.0.attn.bias"].bool()
        masks["h.1.attn.bias"] = masks["h.1.attn.bias"].to(torch.uint8)
        return renamed | masks | {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(3)}

    edit(plain, bare)
    assert greedy(plain) == expected
    assert built(plain, kv_blocks=8).parameters == parameters
    assert built(plain, kv_blocks=8, quantize="int8").parameters == parameters


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: t | {"wte.weight": torch.ones(VOCAB, 64)},
            "tensor transformer.wte.weight is in the checkpoint twice",
        ),
        (lambda t: t | {"h.0.extra": torch.ones(2)}, "tensor transformer.h.0.extra is not part of this architecture"),
        (
            lambda t: {name: tensor for name, tensor in t.items() if name != "transformer.h.1.attn.c_attn.bias"},
            r"tensor transformer.h.1.attn.c_attn.bias is missing",
        ),
        (
            lambda t: t | {"transformer.h.1.mlp.c_fc.weight": t["transformer.h.1.mlp.c_fc.weight"].t()},
            r"tensor transformer.h.1.mlp.c_fc.weight has shape \[256, 64\], config.json says \[64, 256\]",
        ),
    ],
)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_damaged_checkpoint_is_refused_with_its_reason(
    plain: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], reason: str, quantize: str | None
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        engine_of(edit(plain, change), quantize=quantize)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not supported"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights false is not supported"),
        ({"activation_function": "relu"}, "activation_function relu is not supported; supported are gelu_new, "),
        ({"activation_function": ["gelu"]}, r"activation_function \['gelu'\] is not supported"),
        ({"n_head": 3}, "n_embd 64 is not 3 heads of an even number of dimensions"),
        ({"n_positions": None}, "n_positions is missing"),
        ({"n_positions": 0}, "n_positions must be a positive whole number"),
        ({"reorder_and_upcast_attn": "no"}, "reorder_and_upcast_attn must be true or false"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized checkpoints of GPT2LMHeadModel are not supp",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(plain: Path, setting: dict[str, Any], reason: str) -> None:
    path = plain / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(CheckpointError, match=reason):
        engine_of(plain)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "nf4"])
def test_weights_are_rounded_as_they_are_loaded(plain: Path, kind: str, tmp_path: Path) -> None:
    """The reference is transformers with rounded weights; a scale belongs to an output, so they are transposed."""
    twin = Path(shutil.copytree(plain, tmp_path / "twin"))

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in tensors:
            if name.endswith(_LINEARS):
                made = quantized_weights.QUANTIZERS[kind](tensors[name].t().contiguous())
                tensors[name] = made.dequantize(torch.float32).t()
        return tensors

    edit(twin, rounded)
    assert_served_like(twin, engine_of(plain, quantize=kind), tolerance_of(kind))


def test_parameters_are_counted_as_openai_counted_them(tmp_path: Path) -> None:
    settings = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024, "n_embd": 768}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "n_layer": 12, "n_head": 12, "eos_token_id": 50256}))
    config = load_config(tmp_path)
    assert config.positions == LearnedPositions(1024)
    assert config.context_length == 1024
    assert count_parameters(config) == 124_439_808
    assert count_embeddings(config) == (50257 + 1024) * 768


def test_answers_end_at_the_end_of_the_context(plain: Path) -> None:
    """The last learned position is used; there is none after it."""
    engine = engine_of(plain)
    answer = run(engine, job(0, prompt_of(CONTEXT - 5, vocab=VOCAB), max_tokens=5, ignore_eos=True))[0]
    assert len(answer.tokens) == 5
    with pytest.raises(CheckpointError, match="exceeds the model's context of 512"):
        engine_of(plain, max_seq_length=CONTEXT + 1)


def test_verify_compares_gpt2_and_compress_refuses_it_by_name(plain: Path, tmp_path: Path) -> None:
    same = shutil.copytree(plain, tmp_path / "same")
    few = ("--windows", "1", "--length", "96", "--answers", "0")
    result = CliRunner().invoke(verify.cli.app, [str(plain), str(same), *few])
    assert result.exit_code == 0, result.output
    for method in ("int8", "awq", "gptq"):
        result = CliRunner().invoke(compress.cli.app, [method, str(plain), str(tmp_path / method)])
        reason = "model_type gpt2 is not supported; known are Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE"
        assert (result.exit_code, result.output.strip()) == (1, f"weft compress: {plain}: {reason}")
