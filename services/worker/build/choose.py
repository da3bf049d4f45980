"""Chooses what computes and builds the engine on it. Imports only the device that is asked for.

Knows the order of a start, no jobs and no mesh.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from services.worker.build import refused
from services.worker.build.adapters import AdapterReader, adapter_reader
from services.worker.build.drafting.speculate import make_speculation
from services.worker.build.ranks.grid_limits import check_grid
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.kvcache.shared_memory import SharedMemory
from services.worker.loader.config import read_config
from services.worker.loader.exports import has_export
from services.worker.loader.weight_files import weight_files
from services.worker.models.config import ModelConfig
from services.worker.models.encoders.registry import encoder_family
from services.worker.options import RUNTIMES, EngineOptions, Progress

log = logging.getLogger(__name__)

Options = TypeVar("Options", bound=EngineOptions)

_GPU_DEFAULTS: Mapping[str, object] = {
    "max_batch_size": 256,
    "step_tokens": 8192,
    "chunk_tokens": 200,
    "dtype": "bfloat16",
}
_GPU_ENCODER_DEFAULTS: Mapping[str, object] = {
    "max_batch_size": 256,
    "step_tokens": 32768,
    "max_wait_ms": 1.0,
    "dtype": "bfloat16",
}
"""No answer waits for an encoder's batch to end, so it may be large; and texts gather while the one before is computed,
so they wait less when none is. The network of a decoder takes longer, so its batches have as many tokens as steps."""

_READERS = ("onnxruntime", "openvino", "exported")
"""Engines that compute exported files anywhere."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to run, and the shape of its model."""

    engine: GenerationEngine
    config: ModelConfig
    parameters: int
    """Numbers in the checkpoint; 0 where nothing computes."""
    read_adapter: AdapterReader
    shared_memory: SharedMemory | None = None
    """The memory of its blocks, for other processes of this host; None: it is not shared."""


def resolve_engine(settings: Options, folder: Path | None = None, *, encodes: bool = False) -> Options:
    """The settings with the engine chosen, and with its defaults for what is not set. folder: the checkpoint, for a
    choice that depends on it. encodes: it is of an encoder, which leaves `auto` as it is where there is no GPU. Raises
    CheckpointError."""
    engine, chosen = settings.engine, dict[str, object]()
    defaults = _encoder_defaults(folder) if encodes else _GPU_DEFAULTS
    if engine == "auto" and folder is not None and (own := _engine_of_export(folder)):
        chosen = {"engine": own}
    elif engine in ("auto", "gpu"):
        import torch

        if torch.cuda.is_available():
            chosen = {name: value for name, value in defaults.items() if name not in settings.model_fields_set}
            chosen |= {"engine": "gpu", "dtype": defaults["dtype"] if settings.dtype == "auto" else settings.dtype}
        elif engine == "gpu":
            raise CheckpointError("ENGINE=gpu needs a GPU that torch can use")
        elif not encodes:  # What computes an encoder is measured when it is loaded.
            multiplies = folder is not None and _openvino_is_faster(folder, settings)
            chosen = {"engine": "openvino" if multiplies else "torch"}
            if not multiplies:
                chosen["exact_inputs"] = False  # It was a reason to choose torch, which rounds no inputs.
    settings = settings.model_copy(update=chosen)
    # Each sequence of the batch has at least one token in a step.
    return settings.model_copy(update={"step_tokens": max(settings.step_tokens, settings.max_batch_size)})


def _engine_of_export(folder: Path) -> str:
    """The engine for a folder that has an export but no weights, an installed one if there is any; empty: the folder
    has weights or no export."""
    if weight_files(folder):
        return ""
    able = [engine for engine in _READERS if has_export(folder, engine)]
    installed = [engine for engine in able if engine == "exported" or find_spec(engine)]
    return next(iter(installed or able), "")


def _encoder_defaults(folder: Path | None) -> Mapping[str, object]:
    """The defaults on a GPU for the texts of this folder."""
    from services.worker.build.encoders.source import read_raw

    if folder is None or encoder_family(read_raw(folder).architecture):
        return _GPU_ENCODER_DEFAULTS
    return {**_GPU_ENCODER_DEFAULTS, "step_tokens": _GPU_DEFAULTS["step_tokens"]}


def _openvino_is_faster(folder: Path, options: EngineOptions) -> bool:
    """Whether the openvino engine is installed, honours all options, and multiplies with the weights that are asked for
    faster than torch: rounded ones, if their products' inputs may be rounded, too."""
    if options.quantize is None or options.exact_inputs:
        return False  # Most starts on a CPU end here, without the import of all other runtimes.
    from services.worker.build import runtimes

    if options.quantize not in runtimes.ROUNDED or not runtimes.find_version("openvino"):
        return False
    if has_export(folder, "openvino") or runtimes.refusal(options, "openvino"):
        return False
    return read_config(folder).model.moe is None


def build_engine(
    folder: Path,
    options: EngineOptions,
    progress: Progress,
    *,
    graphs: bool = True,
    compile_ahead: bool = False,
    warm_up: bool = True,
) -> BuiltEngine:
    """Load the checkpoint in this folder and warm the engine up. An engine that is not chosen computes on the CPU.

    graphs and compile_ahead as in `assemble`. warm_up: False leaves the warm-up out, where the first answer may be
    slow. Raises CheckpointError.
    """
    check_grid(options)
    if options.engine == "paced":
        from services.worker.build.paced import build_paced_engine

        engine, config = build_paced_engine(folder, options)
        return BuiltEngine(engine, config, 0, adapter_reader(None, 0))
    from services.worker.build.assemble import assemble
    from services.worker.build.torch_recorder import TorchRecorder

    if options.engine in RUNTIMES:
        from services.worker.build.runtimes import assemble_runtime, refusal

        refused.check(f"ENGINE={options.engine}", refusal(options, options.engine))
        parts = assemble_runtime(folder, options, progress)
    else:
        refused.check(f"ENGINE={options.engine}", refused.of_torch(options))
        parts = assemble(folder, options, progress, graphs=graphs, compile_ahead=compile_ahead)
    engine = GenerationEngine(
        options,
        parts.memory,
        parts.runner,
        parts.config.eos_token_ids,
        block_layout=parts.block_layout,
        block_dtype=parts.block_dtype,
        recorder=TorchRecorder,
        speculation=make_speculation(
            options, parts.draft_context, parts.runner.depth > 1, parts.guess_limit, parts.redo_guesses
        ),
        adapter_pages=parts.adapters,
    )
    log.info("memory: %s", parts.memory)
    if warm_up:
        engine.warm_up(progress)
    read = adapter_reader(parts.adapters, options.adapter_rank)
    return BuiltEngine(engine, parts.config, parts.parameters, read, parts.shared_memory)
