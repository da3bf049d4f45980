"""The stored layout of quantized linears: compressed-tensors formats, written by the library that defines them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from torch import Tensor

from compress.choices import Granularity
from kernels.quantized_weights import FP8_BLOCK, INT4_ZERO, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

_EMBEDDINGS = ["lm_head"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization_config of a checkpoint."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    kv: Mapping[str, Any] | None = None

    def quantization_config(self) -> dict[str, Any]:
        """The entry of config.json."""
        group = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(**self.weights),
            input_activations=QuantizationArgs(**self.inputs) if self.inputs else None,
            format=self.format,
        )
        config = QuantizationConfig(
            config_groups={"group_0": group},
            format=self.format,
            quantization_status="compressed",
            ignore=_EMBEDDINGS,
            kv_cache_scheme=QuantizationArgs(**self.kv) if self.kv else None,
        )
        written: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
        return written


_EACH_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


def int8(*, per_tensor: bool, dynamic: bool) -> Scheme:
    """INT8 weights; `dynamic`: inputs are rounded too, with a scale per token (W8A8)."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor" if per_tensor else "channel"}
    return Scheme("int-quantized", weights, {"num_bits": 8, "type": "int", **_EACH_TOKEN} if dynamic else None)


def int4(group: int, *, symmetric: bool, act_order: bool = False) -> Scheme:
    """INT4 weights in groups of inputs."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return Scheme("pack-quantized", {**weights, "actorder": "weight"} if act_order else weights)


def fp8(granularity: Granularity, *, static: bool, kv: bool) -> Scheme:
    """FP8 weights and inputs; `static`: one calibrated input scale, otherwise one per token."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "strategy": granularity.value}
    if granularity is Granularity.BLOCK:
        weights["block_structure"] = [FP8_BLOCK, FP8_BLOCK]
    fixed = {**numbers, "strategy": "tensor", "dynamic": False}
    return Scheme("float-quantized", weights, fixed if static else {**numbers, **_EACH_TOKEN}, fixed if kv else None)


def tensors_of(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """A linear's tensors, keyed by the last part of their names."""
    if isinstance(weight, Int4Weight):
        return _packed(weight)
    assert isinstance(weight, Int8Weight | Fp8Weight), type(weight)
    scale = weight.scale[:1, :1].flatten() if scheme.weights["strategy"] == "tensor" else weight.scale
    tensors = {"weight": weight.values, "weight_scale": scale.bfloat16()}
    if isinstance(weight, Fp8Weight) and weight.input_scale is not None:
        tensors["input_scale"] = weight.input_scale.view(1).bfloat16()
    return tensors


def _packed(weight: Int4Weight) -> dict[str, Tensor]:
    assert weight.order is None, "this format keeps the inputs' own order"
    tensors = {
        "weight_packed": pack_to_int32(weight.unpack().to(torch.int8) - INT4_ZERO, 4),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zero is not None:
        zero = weight.zero.to(torch.int8) - INT4_ZERO
        tensors["weight_zero_point"] = pack_to_int32(zero, 4, packed_dim=0).contiguous()
    return tensors
