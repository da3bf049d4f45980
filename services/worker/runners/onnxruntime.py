"""A decoder or an encoder in ONNX Runtime, on the CPU. Knows one session, no slots.

This file alone imports onnxruntime.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.models.encoders.config import EncoderConfig
from services.worker.runners.runtime.past import PastShape
from services.worker.runners.runtime.session import (
    Call,
    Computed,
    Dimension,
    past_inputs,
    read_signature,
)
from services.worker.runners.runtime.text_session import TextCall, read_text_signature

_DTYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}


class OnnxSession:
    """A `DecoderSession` of an ONNX file."""

    def __init__(self, path: str, config: ModelConfig, max_length: int, threads: int | None) -> None:
        """threads: of the CPU; None: the runtime's choice. Raises CheckpointError, and ImportError."""
        name, self._session = path.rpartition("/")[2], _open(path, threads)
        inputs = {each.name: each for each in self._session.get_inputs()}
        outputs = [each.name for each in self._session.get_outputs()]
        shapes = {each: dimensions(inputs[each].shape) for each in inputs}
        self.signature = read_signature(name, shapes, outputs, config, max_length)
        kind = inputs[past_inputs(config.layers)[0]].type
        if kind not in _DTYPES:
            raise CheckpointError(f"{name} stores keys and values as {kind}; supported are {', '.join(_DTYPES)}")
        self.shape = PastShape(config.layers, config.kv_heads, config.head_dim, _DTYPES[kind])

    def compute(self, call: Call) -> Computed:
        """Compute the tokens of a call; inputs are read where they are."""
        signature = self.signature
        arrays = [tensor.numpy() for tensor in signature.arguments(call)]
        found: list[np.ndarray[Any, Any]] = self._session.run(
            signature.outputs, dict(zip(signature.inputs, arrays, strict=True))
        )
        return signature.computed(call, [torch.from_numpy(array) for array in found])


class OnnxTexts:
    """A `TextSession` of an ONNX file."""

    def __init__(self, path: str, config: EncoderConfig, threads: int | None) -> None:
        """threads: of the CPU; None: the runtime's choice. Raises CheckpointError, and ImportError."""
        self._session = _open(path, threads)
        inputs = {each.name: dimensions(each.shape) for each in self._session.get_inputs()}
        outputs = {each.name: dimensions(each.shape) for each in self._session.get_outputs()}
        self.signature = read_text_signature(path.rpartition("/")[2], inputs, outputs, config)

    def compute(self, call: TextCall) -> torch.Tensor:
        """Hidden states or scores; inputs are read where they are."""
        arrays = [tensor.numpy() for tensor in self.signature.arguments(call)]
        feeds = dict(zip(self.signature.inputs, arrays, strict=True))
        (found,) = self._session.run([self.signature.output], feeds)
        return torch.from_numpy(found).float()


def _open(path: str, threads: int | None) -> Any:
    """A session on the CPU. Raises CheckpointError, and ImportError."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    # Threads of the pool would otherwise spin between steps, and take the cores of the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # The runtime raises many kinds, all of them over the file.
        raise CheckpointError(f"{path.rpartition('/')[2]} cannot be loaded by onnxruntime: {error}") from None


def dimensions(shape: Sequence[object]) -> list[Dimension]:
    """The sizes of an input: names and unknown ones are free."""
    return [size if isinstance(size, int) else None for size in shape]
