"""Each defect of a quantized checkpoint is reported in one line, and the model is not served."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from tests.checkpoints import Shape, make_checkpoint
from tests.quantized import write
from tests.worker.drive import built, open_engine

GOLDEN = Path(__file__).parents[1] / "golden"
Q = "model.layers.1.self_attn.q_proj"
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def load(folder: Path, **options: Any) -> GenerationEngine:
    return open_engine(folder, kv_blocks=8, **options)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """written(kind): a quantized checkpoint, written by its library or kept in tests/golden."""
    folder = tmp_path_factory.mktemp("whole")
    plain = make_checkpoint(folder / "plain", Shape("llama", {"intermediate_size": 128, "num_hidden_layers": 2}))
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if (GOLDEN / kind / "config.json").is_file():
            return GOLDEN / kind
        if kind not in made:
            made[kind] = write(kind, plain, folder).folder
        return made[kind]

    return get


def fill(name: str, value: float) -> Change:
    """Replace the first number of a tensor."""
    return lambda tensors, settings: tensors[name].view(-1)[0].fill_(value)


def without(name: str) -> Change:
    """Remove a tensor."""
    return lambda tensors, settings: tensors.pop(name)


def cut(name: str) -> Change:
    """Remove the last row of a tensor."""
    return lambda tensors, settings: tensors.update({name: tensors[name][:-1].clone()})


def typed(name: str, dtype: torch.dtype) -> Change:
    """Convert a tensor to another type."""
    return lambda tensors, settings: tensors.update({name: tensors[name].to(dtype)})


def setting(**changes: Any) -> Change:
    """Change values of quantization_config."""
    return lambda tensors, settings: settings.update(changes)


def scheme(**changes: Any) -> Change:
    """Change how compressed-tensors' group describes its weights."""
    return lambda tensors, settings: settings["config_groups"]["group_0"]["weights"].update(changes)


def inputs(**changes: Any) -> Change:
    """Replace how compressed-tensors' group describes its inputs."""
    return lambda tensors, settings: settings["config_groups"]["group_0"].update(input_activations=changes)


def state(text: bytes) -> Change:
    """Replace the quantization state of a bitsandbytes weight."""
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
    return lambda tensors, settings: tensors.update({name: torch.tensor(list(text), dtype=torch.uint8)})


def nested(**changes: Any) -> Change:
    """Change what the state of a bitsandbytes weight says about its nested scales."""
    said = {"quant_type": "nf4", "shape": [64, 64], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}
    return state(json.dumps({**said, **changes}).encode())


def zero_points(value: int) -> Change:
    """Give a weight zero points that are not packed."""
    made = torch.full((64, 2), value, dtype=torch.int8)
    return lambda tensors, settings: tensors.update({f"{Q}.weight_zero_point": made})


def act_order(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Group the inputs of a weight in another order."""
    tensors[f"{Q}.weight_g_idx"] = torch.arange(64).flip(0).int() // 32


def targets(*names: str) -> Change:
    """Replace the targets of compressed-tensors' group."""
    return lambda tensors, settings: settings["config_groups"]["group_0"].update(targets=list(names))


def extra_scale(name: str) -> Change:
    """Add a scale."""
    return lambda tensors, settings: tensors.update({name: torch.ones(1)})


FP8_NAN = torch.tensor(0x7F, dtype=torch.uint8)


def fp8_nan(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    tensors[f"{Q}.weight"].view(torch.uint8)[3, 3] = FP8_NAN


def reordered(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    settings["desc_act"] = True
    for name in [name for name in tensors if name.endswith("g_idx")]:
        del tensors[name]


def regrouped(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    tensors[f"{Q}.g_idx"][0] = 1


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("awq", setting(quant_method="hqq"), "quant_method hqq is not supported; supported are awq, gptq"),
        ("awq", lambda tensors, settings: settings.pop("quant_method"), "quant_method none is not supported"),
        ("awq", setting(quant_method=["awq"]), "quant_method ['awq'] is not supported"),
        ("awq", setting(bits=3), "awq with bits=3 is not supported; supported is bits=4"),
        ("awq", setting(version="gemv"), "AWQ version gemv is not supported; supported is gemm"),
        ("awq", setting(group_size=48), "64 inputs and 64 outputs cannot be packed in groups of 48"),
        ("awq", setting(group_size=64), "scales has shape [2, 64], expected is [1, 64]"),
        ("awq", setting(group_size=0), "group_size 0 is not supported"),
        ("awq", without(f"{Q}.scales"), f"tensor {Q}.scales is missing"),
        ("awq", without(f"{Q}.qzeros"), f"tensor {Q}.qzeros is missing"),
        ("awq", without(f"{Q}.qweight"), f"{Q}: neither weight nor qweight is there"),
        ("awq", cut(f"{Q}.qweight"), f"tensor {Q}.qweight has shape [63, 8], expected is [64, 8]"),
        ("awq", typed(f"{Q}.qweight", torch.int64), f"tensor {Q}.qweight has type I64, expected is I32"),
        ("awq", fill(f"{Q}.scales", torch.nan), f"tensor {Q}.scales holds numbers that are not finite"),
        ("awq", fill("model.norm.weight", torch.inf), "tensor model.norm.weight holds numbers that are not finite"),
        ("awq", lambda t, s: t.update({f"{Q}.more": torch.ones(1)}), f"tensor {Q}.more is not part of this"),
        ("awq", lambda t, s: t.update({f"{Q}.bias": torch.ones(64)}), f"tensor {Q}.bias is not part of this"),
        ("gptq", setting(bits=8), "gptq with bits=8 is not supported"),
        ("gptq", setting(checkpoint_format="marlin"), "checkpoint_format marlin is not supported"),
        ("gptq", setting(is_marlin_format=True), "checkpoint_format marlin is not supported"),
        ("gptq", reordered, "tensor model.layers.0.self_attn.q_proj.g_idx is missing"),
        ("gptq-act-order", regrouped, f"{Q}: g_idx does not give every group 32 inputs"),
        ("gptq", cut(f"{Q}.g_idx"), f"tensor {Q}.g_idx has shape [63]"),
        ("int4", without(f"{Q}.weight_scale"), f"tensor {Q}.weight_scale is missing"),
        ("int4-asymmetric", without(f"{Q}.weight_zero_point"), f"tensor {Q}.weight_zero_point is missing"),
        ("int4", fill(f"{Q}.weight_shape", 63), f"{Q}: weight_shape says [63, 64], config.json [64, 64]"),
        ("int4", fill(f"{Q}.weight_scale", -torch.inf), f"tensor {Q}.weight_scale holds numbers that are not finite"),
        ("int4", setting(format="marlin-24"), "compressed-tensors format marlin-24 is not supported"),
        ("int4", setting(config_groups={}), "quantization_config does not say how it is quantized"),
        ("int4", setting(config_groups=[1]), "quantization_config cannot be read"),
        ("int4", setting(quantization_status="calibration"), "quantization_status calibration is not supported"),
        ("int4", setting(sparsity_config={"format": "sparse-24"}), "sparsity sparse-24 is not supported"),
        ("int4", scheme(num_bits=3), "int weights of 3 bits (group) are not supported"),
        ("int4", scheme(num_bits=4, type="float"), "float weights of 4 bits (group) are not supported"),
        ("int4", scheme(group_size="32"), "group_size 32 is not a number"),
        ("int4", scheme(group_size=-32), "64 inputs cannot be shared out in groups of -32"),
        ("int4", scheme(num_bits=math.inf), "int weights of inf bits (group) are not supported"),
        ("int4", scheme(symmetric="no"), "symmetric no is neither true nor false"),
        ("int4", scheme(actorder="group"), "q_proj.weight_g_idx is missing"),
        ("int4", zero_points(1), f"{Q}: it has zero points, and quantization_config says that it is symmetric"),
        ("w8a8", zero_points(1), f"{Q}: it has zero points"),
        ("int4-asymmetric", zero_points(8), f"{Q}: its zero points are not of 4 bits"),
        ("int4", targets("re:("), "target re:( is no pattern: missing )"),
        ("int4", targets("re:(?:.|..|...)+[A-Z]$"), "takes too long to match model.layers.0.self_attn.q_proj"),
        ("int4", targets("re:([a-z_.0-9]+)+[A-Z]"), "quantization_config does not say how it is quantized"),
        ("int4", targets("re:(?:(?:a{99}){99}){99}"), "patterns of at most 500 characters, and counts below 100 of"),
        (
            "int4",
            targets("re:(?x)(?:(?:a{99}) {99}) {99}"),
            "patterns of at most 500 characters, and counts below 100 of",
        ),
        ("int4", targets("re:a{65535}"), "patterns of at most 500 characters, and counts below 100 of"),
        ("int4", targets(f"re:{'.*' * 251}"), "supported are patterns of at most 500 characters"),
        ("int4", extra_scale("model.layers.2.self_attn.k_scale"), "tensor model.layers.2.self_attn.k_scale is not"),
        ("int4", extra_scale("model.layers.1.k_scale"), "tensor model.layers.1.k_scale is not part of"),
        ("int4", setting(kv_cache_scheme={"num_bits": 4, "type": "float"}), "kv_cache_scheme of 4 bits (float) is not"),
        ("int4", setting(kv_cache_scheme="best"), "kv_cache_scheme is not an object"),
        ("int4", inputs(num_bits=8, dynamic=True, symmetric=True), "with dynamic int inputs of 8 bits are"),
        ("w8a8", inputs(num_bits=8, dynamic=False), "with static int inputs of 8 bits are not supported"),
        ("w8a8", inputs(num_bits=8, dynamic=True, symmetric=False), "with asymmetric dynamic int inputs of 8 bits"),
        ("w8a8", scheme(symmetric=False), "asymmetric int weights of 8 bits (channel) are not supported"),
        ("w8a16-groups", scheme(symmetric=False), "asymmetric int weights of 8 bits (group) are not supported"),
        ("w8a16-groups", scheme(group_size=48), "64 inputs cannot be shared out in groups of 48"),
        ("w8a16-groups", scheme(group_size=64), "q_proj.weight_scale has shape [64, 2], expected is [64, 1]"),
        ("w8a16-groups", act_order, f"{Q}: weights of 8 bits with act-order (weight_g_idx) are not supported"),
        (
            "w8a16-groups",
            inputs(num_bits=8, dynamic=True),
            "int weights of 8 bits (group) with dynamic int inputs of 8",
        ),
        ("w8a8", without(f"{Q}.weight_scale"), f"{Q}: its weight is quantized and weight_scale is missing"),
        ("w8a8", typed(f"{Q}.weight", torch.uint8), f"tensor {Q}.weight has type U8, expected is I8"),
        ("fp8-channel", cut(f"{Q}.weight_scale"), f"tensor {Q}.weight_scale has shape [63, 1]"),
        ("fp8-channel", fp8_nan, f"tensor {Q}.weight holds numbers that are not finite"),
        ("fp8-static", without(f"{Q}.input_scale"), f"tensor {Q}.input_scale is missing"),
        ("fp8-static", fill(f"{Q}.input_scale", 0), f"{Q}: input_scale is not positive"),
        ("fp8-compressed-blocks", scheme(block_structure=[64, 64]), "blocks of [64, 64] are not supported"),
        ("fp8-blocks", setting(weight_block_size=[64, 64]), "weight_block_size [64, 64] is not supported"),
        ("fp8-blocks", setting(activation_scheme="best"), "activation_scheme best is not supported"),
        ("fp8-blocks", without(f"{Q}.weight_scale_inv"), f"{Q}: its weight is quantized and weight_scale is missing"),
        ("nf4", setting(bnb_4bit_quant_type="fp4"), "bitsandbytes fp4 is not supported; supported is nf4"),
        ("nf4", setting(load_in_4bit=False, load_in_8bit=True), "bitsandbytes int8 is not supported"),
        ("nf4", state(b"{"), f"{Q}: its quant_state cannot be read"),
        ("nf4", state(b"[" * 60_000), f"{Q}: its quant_state cannot be read: RecursionError"),
        ("nf4", state(b"[" * 70_000), f"{Q}: its quant_state has 70000 bytes"),
        ("nf4", state(b"[]"), f"{Q}: its quant_state is not an object"),
        ("nf4", state(b'{"quant_type": "nf4", "shape": 64}'), f"{Q}: its state says nf4 of shape 64"),
        ("nf4", state(b'{"quant_type": "nf4", "shape": [64, 64], "blocksize": 0}'), f"{Q}: blocks of 0"),
        ("nf4", state(b'{"quant_type": "nf4", "shape": [64, 64], "blocksize": -64}'), f"{Q}: blocks of -64"),
        ("nf4-nested", nested(nested_offset=math.nan), f"{Q}: its quant_state lacks nested_blocksize or nested_offset"),
        ("nf4-nested", nested(nested_offset=10**400), f"{Q}: its quant_state lacks nested_blocksize or nested_offset"),
        ("nf4-nested", nested(nested_blocksize=0), f"{Q}: its quant_state lacks nested_blocksize or nested_offset"),
        ("nf4", state(b'{"quant_type": "nf4", "shape": [64, 32]}'), f"{Q}: its state says nf4 of shape [64, 32]"),
        ("nf4", state(b'{"quant_type": "nf4", "shape": [64, 64], "blocksize": 32}'), f"{Q}: blocks of 32"),
        ("nf4", cut(f"{Q}.weight.absmax"), f"tensor {Q}.weight.absmax has shape [63]"),
        ("nf4-nested", without(f"{Q}.weight.nested_quant_map"), f"tensor {Q}.weight.nested_quant_map is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_its_reason(
    kind: str, change: Change, reason: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(written(kind), tmp_path / "damaged"))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) not in str(caught.value), "the message contains no path"


def test_a_cut_file_is_refused(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written("int4"), tmp_path / "cut"))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(folder)


def test_a_plain_configuration_does_not_hide_quantized_tensors(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written("w8a8"), tmp_path / "hidden"))
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_scale is not part of this architecture"):
        load(folder)


def test_a_quantized_checkpoint_is_not_quantized_again(written: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"quantized already \(quant_method gptq\): leave out --quantize"):
        load(written("gptq"), quantize="int8")


@pytest.mark.parametrize(
    ("kind", "width", "reason"),
    [("int4", 84, "84 inputs cannot be shared out in groups"), ("nf4", 63, "cannot be shared out in blocks of 64")],
)
def test_widths_that_cannot_be_quantized_are_refused(kind: str, width: int, reason: str, tmp_path: Path) -> None:
    shape = Shape("llama", {"intermediate_size": width, "num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=reason):
        load(make_checkpoint(tmp_path / "odd", shape), quantize=kind)


def test_quantizing_non_finite_weights_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q}.weight"].view(-1)[5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight holds numbers that are not finite"):
        load(folder, quantize="int8")


@pytest.mark.parametrize("kind", ["int4", "w8a8", "fp8-channel"])
def test_zero_points_of_zero_are_accepted(kind: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written(kind), tmp_path / "zeros"))
    tensors = load_file(folder / "model.safetensors")
    zero_points(0)(tensors, {})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert built(folder, kv_blocks=8).parameters > 0
