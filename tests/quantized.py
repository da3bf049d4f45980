"""Tiny quantized checkpoints, written by the libraries that define the formats, each with an unquantized twin.

The twin has the weights that the writer's own code dequantizes. Transformers on the twin is the reference.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels.quantized_weights import INT4_ZERO, Int4Weight, quantize_fp8, quantize_int4, quantize_int8
from tests.checkpoints import make_checkpoint
from tests.served import WIDE, read, save

Tensors = dict[str, Tensor]
INPUT_SCALE = 0.05


@dataclass(frozen=True)
class Written:
    """The folders of a quantized checkpoint and of its unquantized twin."""

    folder: Path
    twin: Path


def write(kind: str, plain: Path, folder: Path) -> Written:
    """Quantizes the linear layers, without the head, of an unquantized checkpoint in float32. kind: of WRITERS, or of
    EXPERT_WRITERS, whose model may have experts."""
    quantized, twin = folder / kind, folder / f"{kind}-twin"
    for each in (quantized, twin):
        shutil.copytree(plain, each, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read(plain)
    made, settings, numbers = (WRITERS[kind] if kind in WRITERS else EXPERT_WRITERS[kind])(plain, tensors)
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    replaced = {f"{module}.weight" for module in numbers}
    kept = {name: tensor for name, tensor in tensors.items() if name not in replaced}
    save({**kept, **made}, quantized)
    save({**kept, **{f"{module}.weight": weight for module, weight in numbers.items()}}, twin)
    return Written(quantized, twin)


def modules_of(tensors: Tensors) -> list[str]:
    """The names of the linear modules that are quantized."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


# ---- compressed-tensors ----

Output = tuple[Tensors, dict[str, Any], Tensors]


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Callable[..., Output]:
    """A writer that uses compressed-tensors, with scales from the smallest and largest weights."""

    def make(plain: Path, tensors: Tensors) -> Output:
        model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(**weights),
            input_activations=QuantizationArgs(**inputs) if inputs else None,
        )
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=layout)
        apply_quantization_config(model, config, show_progress=False)
        for name in modules_of(tensors):
            _calibrate(model.get_submodule(name))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        made = {name: tensor.clone() for name, tensor in model.state_dict().items() if "_proj." in name}
        settings = compressor.quantization_config.model_dump(mode="json")
        compressor.decompress_model(model)
        return made, settings, {name: model.get_submodule(name).weight.data for name in modules_of(tensors)}

    return make


def _calibrate(module: Any) -> None:
    args, weight = module.quantization_scheme.weights, module.weight.data
    rows, columns = weight.shape
    if args.strategy == "group":
        parts = weight.view(rows, -1, args.group_size)
        low, high = parts.amin(-1), parts.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy == "block":
        parts = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
        parts = parts.view(parts.shape[0] // 128, 128, -1, 128)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(INPUT_SCALE)


# ---- bitsandbytes ----


def nf4(nested: bool, storage: torch.dtype = torch.uint8) -> Callable[..., Output]:
    """A writer that uses bitsandbytes."""

    def make(plain: Path, tensors: Tensors) -> Output:
        # Its import loads torch's compiler: a sixth of the time that collecting all tests took.
        import bitsandbytes
        from bitsandbytes.functional import dequantize_4bit

        layers: Any = bitsandbytes.nn
        made: Tensors = {}
        numbers: Tensors = {}
        for name in modules_of(tensors):
            weight = tensors[f"{name}.weight"]
            how: dict[str, Any] = {"quant_type": "nf4", "quant_storage": storage}
            linear: Any = layers.Linear4bit(*reversed(weight.shape), bias=False, **how)
            linear.weight = layers.Params4bit(weight, requires_grad=False, compress_statistics=nested, **how)
            linear = linear.to("cpu")
            made |= {f"{name}.{key}": tensor.clone() for key, tensor in linear.state_dict().items()}
            numbers[name] = dequantize_4bit(linear.weight.data, linear.weight.quant_state).float()
        settings = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
        }
        return made, settings, numbers

    return make


# ---- FP8 in blocks, as DeepSeek and transformers write it ----


def fp8_blocks(plain: Path, tensors: Tensors) -> Output:
    """Writes FP8 blocks by the definition of the format: no installed library writes it without a GPU."""
    made: Tensors = {}
    numbers: Tensors = {}
    for name in modules_of(tensors):
        weight = tensors[f"{name}.weight"]
        rows, columns = weight.shape
        parts = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
        scale = parts.view(parts.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        values = (weight / wide).to(torch.float8_e4m3fn)
        made |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}
        numbers[name] = values.float() * wide
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return made, settings, numbers


# ---- mixtures of experts, by the definition of compressed-tensors: in memory transformers stacks their weights ----


def rounded(layout: str, scheme: dict[str, Any], quantize: Callable[[Tensor], Any]) -> Callable[..., Output]:
    """A writer of int8, fp8 or packed int4 weights as `kernels.quantized_weights` rounds them."""

    def make(plain: Path, tensors: Tensors) -> Output:
        made: Tensors = {}
        numbers: Tensors = {}
        for name in modules_of(tensors):
            weight = quantize(tensors[f"{name}.weight"])
            numbers[name] = weight.dequantize(torch.float32)
            if isinstance(weight, Int4Weight):
                steps = weight.unpack().to(torch.int8) - INT4_ZERO
                made |= {f"{name}.weight_packed": pack_to_int32(steps, 4), f"{name}.weight_scale": weight.scale}
                made[f"{name}.weight_shape"] = torch.tensor(weight.shape)
            else:
                made |= {f"{name}.weight": weight.values, f"{name}.weight_scale": weight.scale}
        group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
        settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
        return made, {**settings, "ignore": ["lm_head", "re:.*mlp.gate$"]}, numbers

    return make


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKENS = {"strategy": "token", "dynamic": True, "symmetric": True}

WRITERS: Mapping[str, Callable[..., Output]] = {
    "int4": compressed("pack-quantized", {**_INT4, "symmetric": True}),
    "int4-asymmetric": compressed("pack-quantized", {**_INT4, "symmetric": False}),
    "int4-channel": compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "w8a16": compressed("int-quantized", _INT8),
    "w8a16-packed": compressed("pack-quantized", _INT8),
    "w8a16-groups": compressed("pack-quantized", {**_INT8, "strategy": "group", "group_size": 32}),
    "w8a16-groups-int8": compressed("int-quantized", {**_INT8, "strategy": "group", "group_size": 64}),
    "w8a8": compressed("int-quantized", _INT8, {"num_bits": 8, "type": "int", **_TOKENS}),
    "fp8-tensor": compressed("float-quantized", {**_FP8, "strategy": "tensor"}, {**_FP8, **_TOKENS}),
    "fp8-channel": compressed("float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, **_TOKENS}),
    "fp8-static": compressed(
        "float-quantized", {**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "tensor", "dynamic": False}
    ),
    "fp8-compressed-blocks": compressed(
        "float-quantized",
        {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8-blocks": fp8_blocks,
    "nf4": nf4(nested=False),
    "nf4-nested": nf4(nested=True),
    "nf4-stored-bf16": nf4(nested=True, storage=torch.bfloat16),
}
EXPERT_WRITERS: Mapping[str, Callable[..., Output]] = {
    "experts-int8": rounded("int-quantized", _INT8, quantize_int8),
    "experts-fp8": rounded("float-quantized", {**_FP8, "strategy": "channel"}, quantize_fp8),
    "experts-fp8-blocks": fp8_blocks,
    "experts-int4": rounded("pack-quantized", {**_INT4, "group_size": 128, "symmetric": True}, quantize_int4),
}


def main() -> None:
    """Writes one checkpoint of each kind to the given folder, for machines without these libraries."""
    folder = Path(sys.argv[1])
    plain = make_checkpoint(folder / "plain", WIDE)
    for kind in WRITERS:
        write(kind, plain, folder)


if __name__ == "__main__":
    main()
