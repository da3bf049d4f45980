"""A decoder in TensorRT, built from an ONNX file. Knows one execution context, no slots.

This file alone imports tensorrt. The past is copied to the device for each call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.runners.runtime.past import GRANULE, PastShape
from services.worker.runners.runtime.session import (
    LOGITS_AT,
    TOKENS,
    Call,
    Computed,
    Dimension,
    past_inputs,
    read_signature,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes of a call."""

    rows: int
    tokens: int
    """Tokens of one row."""
    past: int


class TensorrtSession:
    """A `DecoderSession` of a plan, in float32."""

    def __init__(
        self, path: str, config: ModelConfig, max_length: int, limits: Limits, plan: bytes | None, device: str = "cuda"
    ) -> None:
        """plan: one that was built of this file before, for these limits, by this version on this device; None: build
        it, in minutes. Raises CheckpointError, and ImportError."""
        import tensorrt

        self._trt, self._device, self.limits = tensorrt, torch.device(device), limits
        self._logger = tensorrt.Logger(tensorrt.Logger.WARNING)
        self.shape = PastShape(config.layers, config.kv_heads, config.head_dim, torch.float32)
        name = path.rpartition("/")[2]
        self.plan = plan if plan is not None else self._build(path, name, config)
        engine = tensorrt.Runtime(self._logger).deserialize_cuda_engine(self.plan)
        if engine is None:
            raise CheckpointError(f"{name}: the plan of tensorrt cannot be loaded: remove it")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        given = [each for each in names if engine.get_tensor_mode(each) == tensorrt.TensorIOMode.INPUT]
        shapes = {each: _dimensions(engine.get_tensor_shape(each)) for each in given}
        outputs = [each for each in names if each not in shapes]
        self.signature = read_signature(name, shapes, outputs, config, max_length)
        self._context = engine.create_execution_context()

    def compute(self, call: Call) -> Computed:
        """Compute the tokens of a call on the device."""
        context, signature = self._context, self.signature
        held = [tensor.to(self._device).contiguous() for tensor in signature.arguments(call)]
        for name, tensor in zip(signature.inputs, held, strict=True):
            context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        outputs: list[Tensor] = []
        for name in signature.outputs:
            outputs.append(torch.empty(tuple(context.get_tensor_shape(name)), device=self._device))
            context.set_tensor_address(name, outputs[-1].data_ptr())
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        if not context.execute_async_v3(stream):
            raise RuntimeError("tensorrt could not enqueue the call")
        return signature.computed(call, [tensor.cpu() for tensor in outputs])

    def _build(self, path: str, name: str, config: ModelConfig) -> bytes:
        trt = self._trt
        builder = trt.Builder(self._logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse_from_file(path):
            raise CheckpointError(f"{name} cannot be read by tensorrt: {parser.get_error(0)}")
        settings, profile = builder.create_builder_config(), builder.create_optimization_profile()
        for index in range(network.num_inputs):
            given = network.get_input(index).name
            profile.set_shape(given, *input_range(given, config, self.limits))
        settings.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, settings)
        if plan is None:
            raise CheckpointError(f"tensorrt could not build {name}: see its log")
        return bytes(plan)


def input_range(name: str, config: ModelConfig, limits: Limits) -> tuple[Shape, Shape, Shape]:
    """The smallest, the usual and the largest shape of an input; usual is a step of answers."""
    rows, past = limits.rows, -(-limits.past // GRANULE) * GRANULE
    usual = min(8 * GRANULE, past)
    if name in past_inputs(config.layers):
        return tuple((row, config.kv_heads, old, config.head_dim) for row, old in ((1, 0), (rows, usual), (rows, past)))  # type: ignore[return-value]
    if name == TOKENS[1]:
        return (1, 1), (rows, usual + 1), (rows, past + limits.tokens)
    if name == LOGITS_AT:
        return (1,), (rows,), (max(rows, limits.tokens),)
    return (1, 1), (rows, 1), (rows, limits.tokens)


def _dimensions(shape: Sequence[int]) -> list[Dimension]:
    """The sizes of an input: -1 is free."""
    return [None if size < 0 else int(size) for size in shape]
