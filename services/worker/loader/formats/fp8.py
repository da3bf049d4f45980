"""Reads FP8 weights with one scale, a scale for each output, or one for each block of 128 x 128 (DeepSeek's
`quant_method: fp8`). Knows the format's tensors, never how a product is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized_weights import FP8, FP8_BLOCK, Fp8Weight
from services.worker.errors import CheckpointError
from services.worker.loader.formats.module_tensors import ModuleTensors


@dataclass(frozen=True, slots=True)
class Fp8:
    """`quant_method: fp8`. Numbers are multiplied by `weight_scale_inv`, in spite of its name."""

    static: bool
    """Whether the checkpoint has a fixed scale for the inputs of each module."""
    mark = ("weight_scale_inv", "weight_scale")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Fp8":
        """From quantization_config. Raises CheckpointError."""
        block = settings.get("weight_block_size")
        if block is not None and list(block) != [FP8_BLOCK, FP8_BLOCK]:
            raise CheckpointError(f"FP8 weight_block_size {block} is not supported; supported is [128, 128]")
        scheme = settings.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise CheckpointError(f"FP8 activation_scheme {scheme} is not supported; supported are dynamic and static")
        return cls(scheme == "static")

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int) -> Fp8Weight:
        """A module's weight. Raises CheckpointError."""
        name = "weight_scale_inv" if tensors.header("weight_scale_inv") else "weight_scale"
        return read_fp8(tensors, name, outputs, inputs, static=self.static)


def read_fp8(tensors: ModuleTensors, scale_name: str, outputs: int, inputs: int, *, static: bool) -> Fp8Weight:
    """A module's FP8 weight, with scales in any of the three layouts; static: and a scale for its inputs. Raises
    CheckpointError."""
    values = tensors.take("weight", (FP8,), (outputs, inputs))
    blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
    scale = tensors.take_finite(scale_name, (), (1,), (outputs, 1), (outputs,), blocks, (1, 1)).float()
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    input_scale = None
    if static:
        input_scale = _positive(tensors, tensors.take_finite("input_scale", (), (1,), (1, 1)).float().reshape(()))
    if bool((values.view(torch.uint8).bitwise_and(127) == 127).any()):
        raise CheckpointError(f"tensor {tensors.module}.weight holds numbers that are not finite")
    return Fp8Weight(values, scale, input_scale)


def _positive(tensors: ModuleTensors, scale: Tensor) -> Tensor:
    if not bool(scale > 0):
        raise tensors.refuse("input_scale is not positive")
    return scale
