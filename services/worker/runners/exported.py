"""A decoder or an encoder in a file of torch: a torch.export program, an AOTInductor package or a TorchScript module.

Knows no slots. All three have the signature of `PastDecoder.forward` or of `TextNetwork.forward`. An AOTInductor
package is machine code that runs as it is.
"""

import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig
from services.worker.models.encoders.config import EncoderConfig
from services.worker.runners.runtime.network import NetworkSession
from services.worker.runners.runtime.past import PastShape
from services.worker.runners.runtime.session import (
    LOGITS_AT,
    TOKENS,
    Dimension,
    Signature,
    past_outputs,
    read_signature,
)
from services.worker.runners.runtime.text_session import TextCall, read_text_signature, signature_of

_ARGUMENTS = (*TOKENS, LOGITS_AT, "past")


class ExportedSession(NetworkSession):
    """A `DecoderSession` of such a file, in float32 on the CPU."""

    def __init__(self, path: str, config: ModelConfig, max_length: int) -> None:
        """Raises CheckpointError."""
        name, loaded = path.rpartition("/")[2], _load(path)
        if isinstance(loaded, ExportedProgram):
            _check_program(name, loaded, config, max_length)
        elif isinstance(loaded, torch.jit.ScriptModule):
            _check_script(name, loaded, "a decoder with past", _ARGUMENTS)
        super().__init__(_function(loaded))
        self.shape = PastShape(config.layers, config.kv_heads, config.head_dim, torch.float32)


class ExportedTexts:
    """A `TextSession` of such a file, in float32 on the CPU."""

    def __init__(self, path: str, config: EncoderConfig) -> None:
        """Raises CheckpointError."""
        name, loaded = path.rpartition("/")[2], _load(path)
        self._signature = signature_of(config)
        if isinstance(loaded, ExportedProgram):
            values = {node.name: node.meta["val"] for node in loaded.graph.nodes if node.op == "placeholder"}
            shapes = {each: _sizes(values[each]) for each in map(str, loaded.graph_signature.user_inputs)}
            self._signature = read_text_signature(name, shapes, {self._signature.output: ()}, config)
        elif isinstance(loaded, torch.jit.ScriptModule):
            _check_script(name, loaded, "an encoder", self._signature.inputs)
        self._forward: Callable[..., Any] = _function(loaded)

    def compute(self, call: TextCall) -> Tensor:
        """Hidden states or scores."""
        found = self._forward(*self._signature.arguments(call))
        tensor: Tensor = found if isinstance(found, Tensor) else found[0]
        return tensor


Loaded = ExportedProgram | Callable[..., Sequence[Tensor]]


def _function(loaded: Loaded) -> Callable[..., Any]:
    """What is called. The guards of a program hold for the sizes of the example alone; the graph does for all."""
    return loaded.module(check_guards=False) if isinstance(loaded, ExportedProgram) else loaded


def _load(path: str) -> Loaded:
    """Raises CheckpointError."""
    try:
        return _read(path)
    except Exception as error:  # Torch raises many kinds, all of them over the file.
        raise CheckpointError(f"{path.rpartition('/')[2]} cannot be loaded by torch: {error}") from None


def _read(path: str) -> Loaded:
    if not path.endswith(".pt2"):
        with warnings.catch_warnings():  # TorchScript is deprecated, and files of it exist.
            warnings.simplefilter("ignore", DeprecationWarning)
            script: Callable[..., Sequence[Tensor]] = torch.jit.load(path)  # type: ignore[no-untyped-call]
        return script
    with zipfile.ZipFile(path) as archive:
        compiled = any("data/aotinductor/" in name for name in archive.namelist())
    if compiled:
        package: Callable[..., Sequence[Tensor]] = torch._inductor.aoti_load_package(path)
        return package
    return torch.export.load(path)


def _check_program(name: str, program: ExportedProgram, config: ModelConfig, max_length: int) -> None:
    """Raises CheckpointError unless inputs and outputs are those of `PastDecoder`, of the shape of the model."""
    given = [str(each) for each in program.graph_signature.user_inputs]
    signature = Signature(config.layers, picks_logits=True)
    # The tensors of the list `past` are called past_0, past_1, ...
    called = [signature.inputs[index] if each.startswith("past_") and index < len(signature.inputs) else each
              for index, each in enumerate(given)]  # fmt: skip
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    shapes = {each: _sizes(values[found]) for each, found in zip(called, given, strict=True)}
    outputs = ["logits", *past_outputs(config.layers)][: len(program.graph_signature.user_outputs)]
    read_signature(name, shapes, outputs, config, max_length)


def _sizes(tensor: Tensor) -> list[Dimension]:
    return [size if isinstance(size, int) else None for size in tensor.shape]


def _check_script(name: str, script: torch.jit.ScriptModule, what: str, expected: Sequence[str]) -> None:
    schema: Any = script.forward.schema  # type: ignore[attr-defined]
    arguments = [each.name for each in schema.arguments[1:]]
    if arguments != list(expected):
        raise CheckpointError(f"{name} takes {', '.join(arguments)}; {what} takes {', '.join(expected)}")
