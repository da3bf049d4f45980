"""Writes a checkpoint's decoder, with past, or its encoder as a file that other runtimes compute. Knows exporters, no
jobs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as fx_config

from services.worker.build.encoders import export as encoders
from services.worker.build.encoders.source import read_raw, read_source
from services.worker.build.weights import open_source
from services.worker.errors import CheckpointError
from services.worker.loader.sentence_folder import is_text_model
from services.worker.models.config import ModelConfig
from services.worker.options import EngineOptions, Progress
from services.worker.runners.runtime.network import DenseOps, PastDecoder
from services.worker.runners.runtime.quiet import quiet
from services.worker.runners.runtime.session import Signature
from services.worker.runners.runtime.text_session import signature_of

_OPSET = 20
_PLAIN = EngineOptions(engine="torch")
_KEPT = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "?_Pooling/config.json",
)  # fmt: skip
"""Files of the checkpoint that are copied as they are."""


def export(model_dir: Path, out: Path, form: str, progress: Progress) -> None:
    """Write a folder with the decoder in this form, and with what a server needs of the checkpoint beside its weights.

    Raises CheckpointError, also if `out` has files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder")
    program, inputs, outputs = _trace_folder(model_dir, progress)
    out.mkdir(parents=True, exist_ok=True)
    if form == "onnx":
        _write_onnx(program, inputs, outputs, out)
    else:
        torch.export.save(program, out / "model.pt2")
    _copy_settings(model_dir, out)
    progress("export", 1, 1)


def _trace_folder(model_dir: Path, progress: Progress) -> tuple[ExportedProgram, Sequence[str], Sequence[str]]:
    """The graph of a folder's model, and the names of its inputs and outputs. Raises CheckpointError."""
    if is_text_model(model_dir):
        source = read_source(model_dir, read_raw(model_dir))
        network, _ = encoders.load_network(source, progress)
        progress("export", 0, 1)
        texts = signature_of(source.config)
        return encoders.trace(network), texts.inputs, [texts.output]
    decoder, config = load_network(model_dir, progress)
    progress("export", 0, 1)
    signature = Signature(config.layers, True)
    return trace(decoder, config), signature.inputs, signature.outputs


def load_network(
    model_dir: Path, progress: Progress, options: EngineOptions = _PLAIN, ops: DenseOps | None = None
) -> tuple[PastDecoder, ModelConfig]:
    """A checkpoint's decoder as a function, in the options' dtype, of which float32 is the default. ops: its
    operations; None: all weights are plain. Raises CheckpointError."""
    source = open_source(model_dir, options)
    if source.config.moe is not None:
        raise CheckpointError(f"mixtures of experts ({source.config.architecture}) cannot be exported")
    decoder = source.load(ops or DenseOps(), source.config.context_length, options, progress)
    return PastDecoder(decoder).eval(), source.config


def trace(network: PastDecoder, config: ModelConfig) -> ExportedProgram:
    """The network as a graph, in which rows, tokens, past and wanted tokens may be of any number."""
    rows, tokens, past = 2, 3, 5
    batch, new, old, wanted = Dim("batch"), Dim.AUTO, Dim.AUTO, Dim("wanted")
    keys = torch.zeros(rows, config.kv_heads, past, config.head_dim)
    example = (
        torch.zeros(rows, tokens, dtype=torch.int64),
        torch.ones(rows, past + tokens, dtype=torch.int64),
        torch.arange(past, past + tokens).repeat(rows, 1),
        torch.tensor([tokens - 1, rows * tokens - 1]),
        [keys.clone() for _ in range(2 * config.layers)],
    )
    pairs, pasts = {0: batch, 1: new}, [{0: batch, 2: old}] * (2 * config.layers)
    masks = {0: batch, 1: Dim.AUTO}  # past + tokens
    # Otherwise 0 and 1 count as special sizes, and the graph holds for larger ones alone.
    oblivious = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    shapes = (pairs, masks, pairs, {0: wanted}, pasts)
    try:
        with quiet(), torch.no_grad(), oblivious:
            return torch.export.export(network, example, dynamic_shapes=shapes)
    except Exception as error:  # Torch raises many kinds, all of them over what the network computes.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{config.architecture} cannot be exported: {reason}") from None


def _write_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], out: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"{error.name} is not installed: pip install 'weft[onnxruntime]'") from None
    with quiet():
        made = torch.onnx.export(
            program,
            input_names=inputs,
            output_names=outputs,
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert made is not None, "without a file the exporter returns a program"
    made.save(out / "model.onnx", external_data=True)


def _copy_settings(model_dir: Path, out: Path) -> None:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    config.pop("quantization_config", None)  # The weights are plain now.
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for name in _KEPT:
        for file in model_dir.glob(name):
            (out / file.relative_to(model_dir)).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, out / file.relative_to(model_dir))
