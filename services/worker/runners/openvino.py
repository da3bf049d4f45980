"""A decoder or an encoder in OpenVINO on the CPU, from an ONNX file or a traced program. Knows one request, no slots.

This file alone imports openvino.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from kernels.quantized_weights import QuantizedWeight
from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.models.encoders.config import EncoderConfig
from services.worker.runners.openvino_products import Products
from services.worker.runners.runtime.past import PastShape
from services.worker.runners.runtime.products import PRODUCT
from services.worker.runners.runtime.session import Call, Computed, Dimension, Signature, read_signature
from services.worker.runners.runtime.text_session import TextCall, read_text_signature, signature_of

_GROUP = 64
"""Inputs that the plugin rounds together, of products with rounded weights. With 32 a product takes a third longer."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced `PastDecoder`, and the rounded weights that are not in the graph."""

    program: ExportedProgram
    weights: list[QuantizedWeight]
    """Emptied when the session has them: the converter keeps what it was called with."""
    exact_inputs: bool
    """Inputs of products with these weights stay float32; else they are rounded to 8 bits in groups of `_GROUP`."""


class OpenvinoSession:
    """A `DecoderSession` of a compiled model, in float32."""

    def __init__(self, source: str | Traced, config: ModelConfig, max_length: int, threads: int | None) -> None:
        """source: the path of an ONNX file, or a traced decoder. threads: of the CPU; None: the runtime's choice.
        Raises CheckpointError, and ImportError."""
        import openvino

        name = source.rpartition("/")[2] if isinstance(source, str) else "the checkpoint"
        core = openvino.Core()
        settings = _settings(threads)
        if isinstance(source, Traced):
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0 if source.exact_inputs else _GROUP
        try:
            model = core.read_model(source) if isinstance(source, str) else _convert(openvino, source, config)
            compiled = core.compile_model(model, "CPU", settings)
            self._request = compiled.create_infer_request()
        except Exception as error:  # The runtime raises many kinds, all of them over the file.
            raise CheckpointError(f"{name} cannot be loaded by openvino: {error}") from None
        shapes = {port.any_name: _dimensions(port.partial_shape) for port in model.inputs}
        outputs = [found for port in model.outputs for found in port.names]
        self.signature = read_signature(name, shapes, outputs, config, max_length)
        self.shape = PastShape(config.layers, config.kv_heads, config.head_dim, torch.float32)
        places = {found: place for place, port in enumerate(compiled.inputs) for found in port.names}
        self._inputs = [_Input(self._request, places[name], openvino.Tensor) for name in self.signature.inputs]
        places = {found: place for place, port in enumerate(compiled.outputs) for found in port.names}
        self._outputs = [places[name] for name in self.signature.outputs]
        words = compiled.outputs[self._outputs[0]].partial_shape[-1]
        self._bound: _Outputs | None = None
        if self.signature.picks_logits and words.is_static:
            self._bound = _Outputs(self._request, self._outputs, self.shape, words.get_length(), openvino.Tensor)

    def compute(self, call: Call) -> Computed:
        """Compute the tokens of a call; inputs are read where they are."""
        for given, tensor in zip(self._inputs, self.signature.arguments(call), strict=True):
            given.bind(tensor)
        bound = self._bound.bind(call) if self._bound is not None else None
        self._request.start_async()  # `infer` would copy all outputs.
        self._request.wait()
        if bound is not None:
            return bound
        # The next call overwrites the request's own outputs.
        found = [np.array(self._request.get_output_tensor(place).data) for place in self._outputs]
        return self.signature.computed(call, [torch.from_numpy(array) for array in found])


class OpenvinoTexts:
    """A `TextSession` of a compiled model, in float32."""

    def __init__(self, source: str | ExportedProgram, config: EncoderConfig, threads: int | None) -> None:
        """source: the path of an ONNX file, or a traced `TextNetwork`. threads: of the CPU; None: the runtime's choice.
        Raises CheckpointError, and ImportError."""
        import openvino

        name = source.rpartition("/")[2] if isinstance(source, str) else "the checkpoint"
        core = openvino.Core()
        try:
            model = core.read_model(source) if isinstance(source, str) else _convert_texts(openvino, source, config)
            compiled = core.compile_model(model, "CPU", _settings(threads))
            self._request = compiled.create_infer_request()
        except Exception as error:  # The runtime raises many kinds, all of them over the file.
            raise CheckpointError(f"{name} cannot be loaded by openvino: {error}") from None
        inputs = {port.any_name: _dimensions(port.partial_shape) for port in model.inputs}
        outputs = {each: _dimensions(port.partial_shape) for port in model.outputs for each in port.names}
        self.signature = read_text_signature(name, inputs, outputs, config)

    def compute(self, call: TextCall) -> torch.Tensor:
        """Hidden states or scores."""
        arrays = [tensor.numpy() for tensor in self.signature.arguments(call)]
        self._request.infer(dict(zip(self.signature.inputs, arrays, strict=True)), share_inputs=True)
        # The next call overwrites the request's own outputs.
        return torch.from_numpy(np.array(self._request.get_tensor(self.signature.output).data))


class _Input:
    """An input of a request. Keys and values lie in the same memory from step to step: what is bound stays bound."""

    def __init__(self, request: Any, place: int, make: Callable[..., Any]) -> None:
        """make: openvino.Tensor."""
        self._request, self._place, self._make = request, place, make
        self._bound: tuple[int, torch.Size] | None = None
        """Address and shape. The request holds the memory, so that nothing else lies at the address."""

    def bind(self, tensor: torch.Tensor) -> None:
        """Let the request read a tensor, where it is."""
        where = (tensor.data_ptr(), tensor.shape)
        if where != self._bound:
            self._request.set_input_tensor(self._place, self._make(tensor.numpy(), shared_memory=True))
            self._bound = where


class _Outputs:
    """The memory that a request writes its outputs to. From step to step their shapes are the same, and what is bound
    stays bound: to fetch and copy all outputs takes 0.4 of the 29 ms of a step of the 1B shape."""

    def __init__(
        self, request: Any, places: Sequence[int], shape: PastShape, words: int, make: Callable[..., Any]
    ) -> None:
        """places: of the logits, and of the keys and values of each layer in turn. words: of the vocabulary. make:
        openvino.Tensor."""
        self._request, self._places, self._make = request, places, make
        self._shape, self._words = shape, words
        self._computed = Computed(torch.empty(0), torch.empty(0))
        self._sizes: tuple[int, ...] = ()

    def bind(self, call: Call) -> Computed:
        """Let the request write the outputs of this call -> where they will be."""
        sizes = (*call.input_ids.shape, *call.logits_at.shape)
        if sizes != self._sizes:
            rows, tokens, wanted = sizes
            heads, layers = (self._shape.kv_heads, tokens, self._shape.head_dim), 2 * self._shape.layers
            self._computed = Computed(torch.empty(wanted, self._words), torch.empty(layers, rows, *heads))
            for place, tensor in zip(self._places, (self._computed.logits, *self._computed.new), strict=True):
                self._request.set_output_tensor(place, self._make(tensor.numpy(), shared_memory=True))
            self._sizes = sizes
        return self._computed


def _convert(openvino: Any, source: Traced, config: ModelConfig) -> Any:
    """The model of a traced network, with the names of `weft export`."""
    from openvino.frontend.pytorch import ConversionExtension

    signature = Signature(config.layers, picks_logits=True)
    products = Products(openvino, source.weights)
    with warnings.catch_warnings():  # Of torch's, which the converter sets off.
        warnings.simplefilter("ignore")
        model = openvino.convert_model(
            source.program, extension=[ConversionExtension(f"{PRODUCT.replace('::', '.')}.default", products.convert)]
        )
    source.weights.clear()
    for ports, names in ((model.inputs, signature.inputs), (model.outputs, signature.outputs)):
        for port, name in zip(ports, names, strict=True):
            port.tensor.set_names({name})
    return model


def _convert_texts(openvino: Any, program: ExportedProgram, config: EncoderConfig) -> Any:
    """The model of a traced encoder, with the names of `weft export`."""
    signature = signature_of(config)
    with warnings.catch_warnings():  # Of torch's, which the converter sets off.
        warnings.simplefilter("ignore")
        model = openvino.convert_model(program)
    for port, name in zip(model.inputs, signature.inputs, strict=True):
        port.tensor.set_names({name})
    model.outputs[0].tensor.set_names({signature.output})
    return model


def _settings(threads: int | None) -> dict[str, Any]:
    """What a model is compiled with."""
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    return settings if threads is None else settings | {"INFERENCE_NUM_THREADS": threads}


def _dimensions(shape: Any) -> list[Dimension]:
    """The sizes of an input: ranges are free."""
    return [size.get_length() if size.is_static else None for size in shape]
