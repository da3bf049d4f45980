"""Builds the runner of a decoder that another runtime computes. Knows which options it can honour, no jobs."""

import contextlib
import hashlib
import importlib.metadata
import logging
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from services import host
from services.worker.build import memory, refused
from services.worker.build.engine_parts import EngineParts
from services.worker.build.export import load_network, trace
from services.worker.errors import CheckpointError
from services.worker.loader.config import read_config
from services.worker.loader.exports import files_of, find_export, has_export
from services.worker.models.config import ModelConfig, count_parameters
from services.worker.options import EngineOptions, Progress
from services.worker.runners.compiled import CompiledSession
from services.worker.runners.exported import ExportedSession
from services.worker.runners.onnxruntime import OnnxSession
from services.worker.runners.openvino import OpenvinoSession, Traced
from services.worker.runners.runtime.network import DenseOps
from services.worker.runners.runtime.past import GRANULE, PastShape
from services.worker.runners.runtime.products import RoundedOps
from services.worker.runners.runtime.runner import RuntimeRunner
from services.worker.runners.runtime.session import DecoderSession
from services.worker.runners.tensorrt import Limits, TensorrtSession

log = logging.getLogger(__name__)

ROUNDED = ("int8", "int4")
"""Formats that the runtime multiplies with."""


@dataclass(frozen=True, slots=True)
class LoadedRuntime:
    """A decoder that is loaded in its runtime."""

    session: DecoderSession
    shape: PastShape
    weights: int
    """Bytes of the weights."""


def refusal(options: EngineOptions, engine: str) -> str:
    """The option that an engine cannot honour, and why; empty if there is none."""
    if reason := refused.of_runtime(options, engine):
        return reason
    if options.quantize not in (None, *ROUNDED):
        return f"quantize={options.quantize}: it multiplies with {' and '.join(ROUNDED)}"
    return ""


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
    # The tokens of running rows are in the pool and in the buffers that the runtime reads.
    block_bytes = 2 * options.block_size * token_bytes
    plan = memory.plan_memory(config, loaded.weights, 4, block_bytes, options, host.available_memory())
    runner = RuntimeRunner(
        loaded.session,
        loaded.shape,
        config,
        plan.kv_blocks,
        options.block_size,
        options.max_batch_size,
        plan.max_seq_length,
        max(GRANULE, loaded.weights // token_bytes),
    )
    numerics = options.numerics.loaded(str(loaded.shape.dtype).removeprefix("torch."), "")
    layout = numerics.block_layout(options.block_size, config.layers, config.kv_heads, config.head_dim)
    return EngineParts(config, count_parameters(config), plan, runner, layout, numerics.stored)


def _load(
    model_dir: Path, config: ModelConfig, max_length: int, options: EngineOptions, progress: Progress
) -> LoadedRuntime:
    if options.engine == "compile" or (options.engine == "openvino" and not has_export(model_dir, options.engine)):
        return _from_checkpoint(model_dir, max_length, options, progress)
    file = find_export(model_dir, options.engine)
    if options.quantize or options.quantize_head:
        raise CheckpointError(f"{file.name} cannot be rounded: weights are rounded when they are exported")
    if options.exact_inputs:
        raise CheckpointError(f"{file.name} says how it is multiplied: exact_inputs is for a checkpoint")
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
    ops = RoundedOps() if options.engine == "openvino" else DenseOps()
    network, config = load_network(model_dir, progress, options, ops)
    weights, began = network.decoder.nbytes, time.monotonic()
    progress("compile", 0, 1)
    session: CompiledSession | OpenvinoSession
    if isinstance(ops, RoundedOps):
        traced = Traced(trace(network, config), ops.weights, options.exact_inputs)
        session = OpenvinoSession(traced, config, max_length, options.threads)
        # Torch only draws tokens from now on: more threads of it would spin beside those of the runtime.
        torch.set_num_threads(1)
    else:
        session = CompiledSession(network, config)
        session.compile()
    progress("compile", 1, 1)
    log.info("compiled in %.1f s", time.monotonic() - began)
    return LoadedRuntime(session, session.shape, weights)
