"""The process that compiles a model's kernels into the cache: `python -m services.worker.build.compile_kernels`.

It reads one line of JSON (folder, options), runs a model of one layer through all sizes of steps without launching a
kernel, compiles what would have been launched in as many processes as there are cores, and reports in lines of JSON
(done, total, error). Knows the order of a start, never weights: those of a plain checkpoint are random here.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels import compile_cache, kv_pages
from kernels.compile_cache import RecordedKernel
from services.worker.build import assemble, memory
from services.worker.build.kernel_cache import layer_windows, processes
from services.worker.loader import presets
from services.worker.loader.config import CheckpointConfig, read_config
from services.worker.loader.formats.registry import StoredWeights, reader_of
from services.worker.loader.kv_scales import load_kv_scales
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.decoder import Decoder
from services.worker.models.registry import family_of
from services.worker.options import EngineOptions
from services.worker.runners.cuda.runner import GpuRunner

Say = Callable[[dict[str, Any]], None]
_FEW_BLOCKS = 64


def compile_model(folder: Path, options: EngineOptions, say: Say) -> bool:
    """Compile every kernel that a start of this model runs; whether all could be. Raises CheckpointError."""
    with compile_cache.recording() as kernels:
        launch_all(folder, options)
    return not compile_recorded(kernels, processes(), say)


def compile_recorded(kernels: list[RecordedKernel], count: int, say: Say) -> int:
    """Compile in so many processes -> how many kernels could not be."""
    failed = compile_cache.run_jobs(kernels, count, lambda done, total: say({"done": done, "total": total}))
    if failed:
        say({"error": f"{failed} of {len(kernels)} kernels did not compile"})
    return failed


def launch_all(folder: Path, options: EngineOptions) -> None:
    """Run all sizes of steps of a model of one layer of each kind, as `assemble` and the engine's start do."""
    from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps, exact_products

    exact_products()
    settings = read_config(folder)
    whole = settings.model
    stored = assemble.stored_dtype(whole, options)
    max_length = memory.check_length(whole, options)
    ops = InvariantTritonOps() if options.deterministic else TritonOps()
    model = _few_layers(folder, settings, options, ops, max_length)
    if stored == kv_pages.FP8:
        _set_scales(model, folder, stored, options)
    runner = GpuRunner(model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens, stored)
    runner.kv.allocate(_FEW_BLOCKS)
    runner.launch_all()


def _few_layers(folder: Path, settings: CheckpointConfig, options: EngineOptions, ops: Any, max_length: int) -> Decoder:
    """A model of a few layers (`layer_windows`). A quantized checkpoint's first layers say how theirs are laid out."""
    whole = settings.model
    windows = layer_windows(whole)
    config = replace(whole, layers=len(windows), windows=windows)
    reader = reader_of(settings.quantization, options.quantize)
    read = None
    if isinstance(reader, StoredWeights):
        checkpoint = open_checkpoint(folder).renamed(family_of(config.architecture).tensor_name)
        read = _of_layers(checkpoint, len(windows))
    source = assemble.WeightSource(config, read, reader)
    return source.load(ops, max_length, options, lambda phase, done, total: None)


def _of_layers(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The checkpoint without its later layers."""
    headers = {
        name: header
        for name, header in checkpoint.headers.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    return replace(checkpoint, headers=headers)


def _set_scales(model: Decoder, folder: Path, stored: torch.dtype, options: EngineOptions) -> None:
    """Scales of keys and values where the model will have some: kernels are compiled with or without."""
    if not presets.is_random(folder):
        load_kv_scales(model.layers, open_checkpoint(folder))
    if assemble.measures_scales(model, stored, options):
        for layer in model.layers:
            layer.attention.kv_scales = torch.ones(2, layer.attention.kv_heads, device=model.embedding.device)


def _end_with_parent() -> None:
    """End this process and those that it has forked when its input is closed."""

    def watch() -> None:
        while os.read(0, 1 << 12):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _read_order() -> dict[str, Any]:
    """The first line of the input, and not a byte of what is behind it."""
    line = b""
    while not line.endswith(b"\n"):
        if not (read := os.read(0, 1)):
            break
        line += read
    order: dict[str, Any] = json.loads(line)
    return order


def main() -> None:
    """One order from the standard input. Exits with 0 if every kernel is compiled."""
    order, out = _read_order(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no report.
    _end_with_parent()

    def say(told: dict[str, Any]) -> None:
        out.write(json.dumps(told) + "\n")
        out.flush()

    try:
        good = compile_model(Path(order["folder"]), EngineOptions(**order["options"]), say)
    except Exception as error:  # Whatever it is, the engine can start without this process.
        say({"error": f"{type(error).__name__}: {error}"})
        good = False
    sys.stderr.flush()
    os._exit(0 if good else 1)  # CUDA's own end takes a second.


if __name__ == "__main__":
    main()
