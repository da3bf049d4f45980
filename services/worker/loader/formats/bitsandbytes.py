"""Reads NF4 weights as bitsandbytes writes them, with scales that are plain or quantized themselves (QLoRA, Dettmers et
al. 2023). Knows the format's tensors, never how a product is computed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized_weights import NF4_BLOCK, Nf4Weight
from services.worker.errors import CheckpointError
from services.worker.loader.files import parse_json
from services.worker.loader.formats.module_tensors import ModuleTensors
from services.worker.loader.tensors import FLOATS

_STATE = "weight.quant_state.bitsandbytes__nf4"
_BYTE = (torch.uint8,)
_LONGEST_STATE = 1 << 16


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """`quant_method: bitsandbytes` with 4-bit weights of type nf4."""

    mark = ("weight.absmax",)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "BitsAndBytes":
        """From quantization_config. Raises CheckpointError."""
        fours = settings.get("load_in_4bit") is True
        kind = settings.get("bnb_4bit_quant_type", "fp4") if fours else "int8"
        if kind != "nf4":
            raise CheckpointError(f"bitsandbytes {kind} is not supported; supported is nf4")
        return cls()

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int) -> Nf4Weight:
        """A module's weight. Raises CheckpointError."""
        if inputs % 2:
            raise tensors.refuse(f"{inputs} inputs are not even")
        state = self._state(tensors)
        if state.get("quant_type") != "nf4" or state.get("shape") != [outputs, inputs]:
            stated = f"{state.get('quant_type')} of shape {state.get('shape')}"
            raise tensors.refuse(f"its state says {stated}, expected is nf4 of shape {[outputs, inputs]}")
        block = state.get("blocksize")
        if not isinstance(block, int) or block < 1 or block % NF4_BLOCK or outputs * inputs % block:
            raise tensors.refuse(f"blocks of {block} are not supported; supported are multiples of {NF4_BLOCK}")
        blocks = outputs * inputs // block
        packed = self._packed(tensors, outputs * inputs // 2)
        code = tensors.take_finite("weight.quant_map", (16,)).float()
        nested = tensors.header("weight.nested_absmax") is not None
        absmax = self._nested(tensors, state, blocks) if nested else tensors.take_finite("weight.absmax", (blocks,))
        absmax = absmax.float().repeat_interleave(block // NF4_BLOCK)
        return Nf4Weight(packed.reshape(outputs, inputs // 2), absmax, code)

    @staticmethod
    def _packed(tensors: ModuleTensors, count: int) -> Tensor:
        """`count` packed bytes, uint8. `bnb_4bit_quant_storage` may store them as another type, whose values mean
        nothing."""
        header = tensors.header("weight")
        stored = count // header.dtype.itemsize if header else count
        return tensors.take("weight", (*_BYTE, *FLOATS), (stored, 1), (1, stored)).view(torch.uint8)

    @staticmethod
    def _state(tensors: ModuleTensors) -> dict[str, Any]:
        """The quantization state of a module, which is JSON stored as bytes."""
        header = tensors.header(_STATE)
        if header and header.elements > _LONGEST_STATE:
            raise tensors.refuse(f"its quant_state has {header.elements} bytes")
        state = parse_json(bytes(tensors.take(_STATE, _BYTE).flatten().tolist()), f"{tensors.module}: its quant_state")
        if not isinstance(state, dict):
            raise tensors.refuse("its quant_state is not an object")
        return state

    @staticmethod
    def _nested(tensors: ModuleTensors, state: Mapping[str, Any], blocks: int) -> Tensor:
        """Dequantize nested scales, float32 [blocks]: a value of the nested code times its block's scale, plus the mean
        of all scales."""
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not isinstance(size, int) or size < 1 or not isinstance(offset, float) or not math.isfinite(offset):
            raise tensors.refuse("its quant_state lacks nested_blocksize or nested_offset")
        size = min(size, blocks)
        values = tensors.take("weight.absmax", _BYTE, (blocks,))
        code = tensors.take_finite("weight.nested_quant_map", (256,)).float()
        scale = tensors.take_finite("weight.nested_absmax", (-(-blocks // size),)).float()
        return code[values.int()] * scale.repeat_interleave(size)[:blocks] + offset
