"""Chooses how the weights of linear modules are read: by the format that a checkpoint's quantization_config names, or
rounded while they load. Knows the formats by name, never their tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kernels.quantized_weights import NF4_BLOCK, QUANTIZERS, QuantizedWeight, Weight
from services.worker.errors import CheckpointError
from services.worker.loader.formats.awq_gptq import Awq, Gptq
from services.worker.loader.formats.bitsandbytes import BitsAndBytes
from services.worker.loader.formats.compressed_tensors import CompressedTensors
from services.worker.loader.formats.fp8 import Fp8
from services.worker.loader.formats.module_tensors import ModuleTensors
from services.worker.parallel.shards import Span

_QUANTIZED = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)


class Format(Protocol):
    """Reads quantized weights of one kind of checkpoint."""

    @property
    def mark(self) -> tuple[str, ...]:
        """Names of tensors: a quantized module has at least one of them, a plain one has none."""

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int, /) -> QuantizedWeight:
        """The weight of a quantized module. Raises CheckpointError."""


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq.of,
    "gptq": Gptq.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "bitsandbytes": BitsAndBytes.of,
}


def format_of(settings: Mapping[str, Any]) -> Format:
    """The format that this quantization_config describes. Raises CheckpointError."""
    method = str(settings.get("quant_method", "none"))
    if method not in _FORMATS:
        raise CheckpointError(f"quant_method {method} is not supported; supported are {', '.join(_FORMATS)}")
    try:
        return _FORMATS[method](settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"quantization_config cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Reads the weights of a quantized checkpoint; modules that it does not quantize stay plain."""

    format: Format

    def is_grouped_int8(self, module: str) -> bool:
        """Whether a module's weight is of 8-bit integers in groups, which a CPU dequantizes at load."""
        return isinstance(self.format, CompressedTensors) and self.format.is_grouped_int8(module)

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int, /) -> Weight:
        """The weight of a linear module. Raises CheckpointError."""
        if any(tensors.header(name) for name in self.format.mark):
            return self.format.read(tensors, outputs, inputs)
        header = tensors.header("weight")
        if header is None:
            raise tensors.refuse(f"neither weight nor {self.format.mark[0]} is there")
        if header.dtype in _QUANTIZED:
            raise tensors.refuse(f"its weight is quantized and {self.format.mark[-1]} is missing")
        return tensors.take_finite("weight", (outputs, inputs))


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """Reads the weights of a plain checkpoint and rounds each but the head's, while the checkpoint loads."""

    kind: str
    """One of kernels.quantized_weights.QUANTIZERS."""
    rows: Mapping[str, tuple[Span, int]] = field(default_factory=dict)
    """By module: the inputs that this rank has of how many. Their weights are read whole, since ranks share scales."""

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int, /) -> Weight:
        """The weight of a linear module. Raises CheckpointError."""
        span, inputs = self.rows.get(tensors.module, (None, inputs))
        plain = tensors.take_finite("weight", (outputs, inputs))
        if tensors.module == "lm_head":
            return plain
        if self.kind == "nf4" and (outputs * inputs % NF4_BLOCK or inputs % 2):
            raise tensors.refuse(f"{outputs} x {inputs} numbers cannot be shared out in blocks of {NF4_BLOCK}")
        try:
            rounded = QUANTIZERS[self.kind](plain)
            return rounded if span is None else rounded.columns(span.start, span.stop)
        except ValueError as error:
            raise tensors.refuse(str(error)) from None


WeightReader = StoredWeights | RoundedWeights


def reader_of(settings: Mapping[str, Any] | None, quantize: str | None) -> WeightReader | None:
    """The reader of the weights of linear modules; None: they are plain and stay so. Raises CheckpointError.

    `settings` is the checkpoint's quantization_config, `quantize` the format that the worker's settings ask for.
    """
    if settings and quantize:
        method = settings.get("quant_method", "unknown")
        raise CheckpointError(f"the checkpoint is quantized already (quant_method {method}): leave out --quantize")
    if settings:
        return StoredWeights(format_of(settings))
    return RoundedWeights(quantize) if quantize else None
