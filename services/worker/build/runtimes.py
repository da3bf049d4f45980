"""Builds the runner of a decoder that another runtime computes. Knows which options it can honour, no jobs."""

import contextlib
import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from services import host
from services.worker.build import memory
from services.worker.build.assemble import EngineParts
from services.worker.build.export import load_network, trace
from services.worker.errors import CheckpointError
from services.worker.loader.config import read_config
from services.worker.loader.exports import files_of, find_export, has_export
from services.worker.models.config import ModelConfig, count_parameters
from services.worker.options import EngineOptions, Progress
from services.worker.runners.compiled import CompiledSession
from services.worker.runners.exported import ExportedSession
from services.worker.runners.onnxruntime import OnnxSession
from services.worker.runners.openvino import OpenvinoSession
from services.worker.runners.runtime.past import GRANULE, PastShape
from services.worker.runners.runtime.runner import RuntimeRunner
from services.worker.runners.runtime.session import DecoderSession
from services.worker.runners.tensorrt import Limits, TensorrtSession

log = logging.getLogger(__name__)

_REFUSED: Mapping[str, str] = {
    "deterministic": "its numbers depend on the batch",
    "speculate": "it checks no guesses",
    "quantize": "weights are rounded when they are exported",
    "quantize_head": "weights are rounded when they are exported",
    "dtype": "it computes in the format of the exported file, or in float32",
    "kv_dtype": "it stores keys and values as it computes them",
    "kv_scales": "it stores keys and values as it computes them",
    "host_kv_bytes": "it keeps no prefixes",
    "adapter_slots": "it computes no adapters",
    "tensor_parallel": "it computes on one rank",
    "pipeline_parallel": "it computes on one rank",
}
"""Options that these engines cannot honour, and why."""


@dataclass(frozen=True, slots=True)
class LoadedRuntime:
    """A decoder that is loaded in its runtime."""

    session: DecoderSession
    shape: PastShape
    weights: int
    """Bytes of the weights."""


def runtime_options(options: EngineOptions) -> EngineOptions:
    """The options as these engines honour them. Raises CheckpointError for one that they cannot."""
    fields = type(options).model_fields
    for name, reason in _REFUSED.items():
        value = getattr(options, name)
        honoured = name == "dtype" and options.engine == "compile"
        if value and value != fields[name].default and not honoured:
            raise CheckpointError(f"ENGINE={options.engine} cannot honour {name}: {reason}")
    if options.prefix_cache and "prefix_cache" in options.model_fields_set:
        raise CheckpointError(f"ENGINE={options.engine} cannot honour prefix_cache: it keeps no prefixes")
    return options.model_copy(update={"prefix_cache": False})


def assemble_runtime(model_dir: Path, options: EngineOptions, progress: Progress) -> EngineParts:
    """Load an exported decoder. Raises CheckpointError."""
    config = read_config(model_dir).model
    max_length = memory.check_length(config, options)
    if options.engine != "onnxruntime" and options.threads:
        torch.set_num_threads(options.threads)
    try:
        loaded = _load(model_dir, config, max_length, options, progress)
    except ImportError as error:
        raise CheckpointError(f"{error.name} is not installed: pip install 'weft[{options.engine}]'") from None
    token_bytes = loaded.shape.token_bytes
    # Rows that are computed together anew are in memory twice while they are copied.
    block_bytes = 2 * options.block_size * token_bytes
    plan = memory.plan_memory(config, loaded.weights, 4, block_bytes, options, host.available_memory())
    runner = RuntimeRunner(
        loaded.session,
        loaded.shape,
        config.vocab_size,
        options.max_batch_size,
        max(GRANULE, loaded.weights // token_bytes),
    )
    return EngineParts(config, count_parameters(config), plan, runner, "")


def _load(
    model_dir: Path, config: ModelConfig, max_length: int, options: EngineOptions, progress: Progress
) -> LoadedRuntime:
    if options.engine == "compile" or (options.engine == "openvino" and not has_export(model_dir, options.engine)):
        return _from_checkpoint(model_dir, max_length, options, progress)
    file = find_export(model_dir, options.engine)
    progress("weights", 0, 1)
    session: ExportedSession | OnnxSession | OpenvinoSession | TensorrtSession
    if options.engine == "exported":
        session = ExportedSession(str(file), config, max_length)
    elif options.engine == "tensorrt":
        session = _on_tensorrt(file, config, max_length, options)
    elif options.engine == "openvino":
        session = OpenvinoSession(str(file), config, max_length, options.threads)
    else:
        session = OnnxSession(str(file), config, max_length, options.threads)
    progress("weights", 1, 1)
    return LoadedRuntime(session, session.shape, sum(each.stat().st_size for each in files_of(file)))


def _on_tensorrt(file: Path, config: ModelConfig, max_length: int, options: EngineOptions) -> TensorrtSession:
    """A plan is built once for these limits, and kept in the folder for this version and device."""
    limits = Limits(options.max_batch_size, options.step_tokens, max_length)
    stat, device = file.stat(), torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    identity = (find_version("tensorrt"), device, astuple(limits), stat.st_size, stat.st_mtime_ns)
    kept = file.parent / "tensorrt" / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.plan"
    session = TensorrtSession(str(file), config, max_length, limits, kept.read_bytes() if kept.is_file() else None)
    if not kept.is_file():
        with contextlib.suppress(OSError):  # A folder that cannot be written costs the next start a build.
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(session.plan)
    return session


def find_version(package: str) -> str:
    """The installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _from_checkpoint(model_dir: Path, max_length: int, options: EngineOptions, progress: Progress) -> LoadedRuntime:
    """The decoder of a checkpoint that was not exported, traced or compiled now."""
    network, config = load_network(model_dir, progress, options)
    weights, began = network.decoder.nbytes, time.monotonic()
    progress("compile", 0, 1)
    session: CompiledSession | OpenvinoSession
    if options.engine == "compile":
        session = CompiledSession(network, config)
        session.compile()
    else:
        session = OpenvinoSession(trace(network, config), config, max_length, options.threads)
    progress("compile", 1, 1)
    log.info("compiled in %.1f s", time.monotonic() - began)
    return LoadedRuntime(session, session.shape, weights)
