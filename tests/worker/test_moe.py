"""Properties of mixtures of experts: stacked tensors, experts in fewer bits, `weft verify`, and refusals."""

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
from kernels.moe import reference
from kernels.moe.weights import ExpertStack
from services.worker.errors import CheckpointError
from services.worker.loader.config import load_config
from services.worker.models.config import count_parameters
from tests.checkpoints import VOCAB, Shape, make_checkpoint
from tests.served import assert_served_like, engine_of, read, save, tolerance_of
from tests.worker.drive import built, job, prompt_of, run
from tests.worker.test_adapter_errors import tensors, write

PROMPT = prompt_of(33, vocab=VOCAB)
MIXTRAL = Shape("mixtral", {"num_local_experts": 4, "num_hidden_layers": 2})
QWEN = Shape(
    "qwen3-moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral in one file."""
    return make_checkpoint(tmp_path_factory.mktemp("mixtral") / "plain", MIXTRAL)


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A folder of its own for a test that changes it."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Changes the weights of a checkpoint with one file."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path, {"format": "pt"})
    return folder


def greedy(folder: Path, **options: Any) -> tuple[list[int], list[float | None]]:
    answer = run(engine_of(folder, **options), job(0, PROMPT, max_tokens=16, logprobs=0, ignore_eos=True))[0]
    return answer.tokens, answer.logprobs


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers names and stacks the experts in memory."""
    made = {
        name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items() if "experts" not in name
    }
    for layer in range(2):
        old, new = (f"model.layers.{layer}.{name}.experts" for name in ("block_sparse_moe", "mlp"))
        w1, w2, w3 = (
            torch.stack([tensors[f"{old}.{expert}.{name}.weight"] for expert in range(4)])
            for name in ("w1", "w2", "w3")
        )
        made |= {f"{new}.gate_up_proj": torch.cat((w1, w3), 1), f"{new}.down_proj": w2}
    return made


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_stacked_experts_are_read_where_they_lie(plain: Path, copy: Path, quantize: str | None) -> None:
    parameters = built(plain, kv_blocks=8).parameters
    edit(copy, stacked)
    assert greedy(copy, quantize=quantize) == greedy(plain, quantize=quantize)
    assert built(copy, kv_blocks=8).parameters == parameters == count_parameters(load_config(plain))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "nf4"])
def test_experts_are_rounded_as_they_are_loaded(plain: Path, copy: Path, kind: str) -> None:
    """The reference is transformers with rounded weights; the router is never rounded."""

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if name.startswith("model.layers") and tensor.ndim == 2 and ".gate." not in name:
                tensors[name] = quantized_weights.QUANTIZERS[kind](tensor).dequantize(torch.float32)
        return tensors

    edit(copy, rounded)
    assert_served_like(copy, engine_of(plain, quantize=kind), tolerance_of(kind), mean=kind == "int4")


def test_a_deterministic_engine_gives_a_token_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen", QWEN)
    engine = engine_of(folder, deterministic=True, quantize="int8")
    alone = run(engine, job(0, PROMPT, max_tokens=12, logprobs=0))[0]
    jobs = [job(key, prompt_of(5 * key, vocab=VOCAB), max_tokens=12) for key in range(1, 6)]
    beside = run(engine, *jobs, job(9, PROMPT, max_tokens=12, logprobs=0))[9]
    assert (beside.tokens, beside.logprobs) == (alone.tokens, alone.logprobs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: {name: x for name, x in t.items() if "experts.3.w2" not in name},
            r"tensor model.layers.0.block_sparse_moe.experts.3.w2.weight is missing \(2 of ",
        ),
        (
            lambda t: t | {"model.layers.0.block_sparse_moe.experts.4.w1.weight": torch.ones(96, 64)},
            "tensor model.layers.0.block_sparse_moe.experts.4.w1.weight is not part of this architecture",
        ),
        (
            lambda t: t | {"model.layers.1.block_sparse_moe.gate.weight": torch.ones(3, 64)},
            r"gate.weight has shape \[3, 64\], config.json says \[4, 64\]",
        ),
        (
            lambda t: stacked(t) | {"model.layers.1.mlp.experts.down_proj": torch.ones(3, 64, 96)},
            "tensor model.layers.1.block_sparse_moe.experts.3.w2.weight is missing",
        ),
        (
            lambda t: stacked(t) | {"model.layers.1.mlp.experts.gate_up_proj": torch.ones(4, 33, 64)},
            "tensor model.layers.1.block_sparse_moe.experts.0.w1.weight is missing",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_its_reason(
    copy: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        engine_of(edit(copy, change))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds the 4 experts"),
        (
            {"architectures": ["GptOssForCausalLM"]},
            "architecture GptOssForCausalLM is not supported",
        ),
        ({"num_local_experts": 5000}, "num_local_experts must be a positive whole number of at most 1,024"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0.5]},
            "mlp_only_layers is not a list of layers",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(copy: Path, setting: dict[str, Any], reason: str) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(CheckpointError, match=reason):
        engine_of(copy)


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain weights that a compressed checkpoint stands for."""
    scales = {name.removesuffix("_scale"): scale for name, scale in tensors.items() if name.endswith("_scale")}
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
    return {name: tensor.float() * scales[name].float() if name in scales else tensor for name, tensor in plain.items()}


@pytest.mark.parametrize(("method", "shape"), [("int8", MIXTRAL), ("fp8", QWEN)], ids=["int8", "fp8"])
def test_compressed_experts_are_served_as_what_they_stand_for(tmp_path: Path, method: str, shape: Shape) -> None:
    base, out = make_checkpoint(tmp_path / "base", shape), tmp_path / "out"
    result = CliRunner().invoke(compress.cli.app, [method, str(base), str(out)])
    assert result.exit_code == 0, result.output
    stored = read(out)
    linears = {name for name in read(base) if name.startswith("model.layers") and name.endswith(("_proj.weight",
        "w1.weight", "w2.weight", "w3.weight"))}  # fmt: skip
    assert {name.removesuffix("_scale") for name in stored if name.endswith("_scale")} == linears
    twin = Path(shutil.copytree(base, tmp_path / "twin"))
    save(dequantized(stored), twin)
    assert_served_like(twin, engine_of(out), tolerance_of(method))


def test_methods_that_need_calibration_refuse_experts_by_name(plain: Path, tmp_path: Path) -> None:
    for method in (["gptq"], ["awq"], ["smoothquant"], ["fp8", "--static"]):
        result = CliRunner().invoke(compress.cli.app, [*method, str(plain), str(tmp_path / "out")])
        reason = "mixtures of experts are compressed by int8 and fp8 without calibration alone"
        assert (result.exit_code, result.output.strip()) == (1, f"weft compress: {plain}: {reason}")


def test_verify_compares_the_rows_of_experts(plain: Path, copy: Path) -> None:
    few = ("--windows", "1", "--length", "64", "--answers", "0")
    result = CliRunner().invoke(verify.cli.app, [str(plain), str(copy), *few])
    assert result.exit_code == 0, result.output
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"

    def damaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][5] *= 3
        return tensors

    result = CliRunner().invoke(verify.cli.app, [str(plain), str(edit(copy, damaged)), *few])
    assert result.exit_code != 0
    assert "experts.2.w1" in result.output


def test_routes_are_the_likeliest_experts_and_list_each_entry_once() -> None:
    logits = torch.randn(11, 6)
    for normalized in (False, True):
        routes = reference.route(logits, 3, normalized)
        chances = logits.softmax(-1)
        best = chances.topk(3)
        weights = best.values / best.values.sum(-1, keepdim=True) if normalized else best.values
        torch.testing.assert_close(routes.weights_Tk, weights)
        assert sorted(routes.order.tolist()) == list(range(33))
        for expert in range(6):
            entries = routes.order[routes.offsets[expert] : routes.offsets[expert + 1]]
            assert all(best.indices.flatten()[entry] == expert for entry in entries)
    assert reference.route(torch.zeros(2, 4), 2, True).order.tolist() == [0, 2, 1, 3]


def test_an_adapter_of_an_expert_is_refused_by_its_name(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w1"
    adapter = write(tmp_path / "adapter", {}, tensors(f"base_model.model.{name}", outputs=96))
    with pytest.raises(CheckpointError, match=f"{name}, which is no product of this model's layers"):
        built(plain, kv_blocks=8).read_adapter("one", str(adapter))


def test_experts_of_one_layer_have_one_format_on_a_device() -> None:
    stack = ExpertStack(2, 64, 128, torch.bfloat16)
    weight = torch.randn(64, 128)
    part = stack.keep(1, quantized_weights.quantize_int4(weight, 32))
    assert (part.nbytes, stack.weight.nbytes) == (64 * (64 + 16), 2 * 64 * (64 + 16))
    with pytest.raises(ValueError, match="the experts of a layer have different formats"):
        stack.keep(0, quantized_weights.quantize_int8(weight))
