"""The process that compiles a model's kernels into the cache: `python -m services.worker.build.compile_kernels`.

It reads one line of JSON (folder, options), runs a model of one layer through all sizes of steps without launching a
kernel, compiles what would have been launched in as many processes as there are cores, and reports in lines of JSON
(done, total, error). Knows the order of a start, never weights: those of a plain checkpoint are random here.
"""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import compile_cache, kv_pages
from kernels.compile_cache import RecordedKernel
from services.worker.build import memory
from services.worker.build.assemble import measures_scales
from services.worker.build.drafting.draft import draft_head, draft_options, locate_draft
from services.worker.build.drafting.heads_config import read_heads
from services.worker.build.kernel_cache import layer_kinds, processes, with_layers
from services.worker.build.ranks.gpu_rank import peer_words_of, plain_ops, rank_ops
from services.worker.build.ranks.grid import own_part
from services.worker.build.weights import WeightSource, dtype_of, stored_dtype
from services.worker.loader import presets
from services.worker.loader.config import CheckpointConfig, read_config
from services.worker.loader.family_tensors import open_family
from services.worker.loader.formats.registry import StoredWeights, reader_of
from services.worker.loader.kv_scales import load_kv_scales
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.decoder import Decoder
from services.worker.models.draft_heads import DraftHeads
from services.worker.models.sharding import sizes_of
from services.worker.models.stage import StageDecoder
from services.worker.options import EngineOptions
from services.worker.parallel.gpu_collectives import UnconnectedCollectives
from services.worker.parallel.shards import shard_of
from services.worker.parallel.topology import Grid
from services.worker.runners.cuda.adapters import GpuAdapters
from services.worker.runners.cuda.ops import TritonOps, exact_products
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.sharing import staging
from services.worker.runners.step import MOST_GUESSES

Report = Callable[[dict[str, Any]], None]
_FEW_BLOCKS = 64
_LAYER = re.compile(r"(model\.layers\.)([0-9]+)(\..*)")


def compile_model(folder: Path, options: EngineOptions, report: Report) -> bool:
    """Compile every kernel that a start of this model runs; whether all could be. Raises CheckpointError."""
    with compile_cache.recording() as kernels:
        launch_all(folder, options)
    return not compile_recorded(kernels, processes(), report)


def compile_recorded(kernels: list[RecordedKernel], count: int, report: Report) -> int:
    """Compile in `count` processes -> how many kernels could not be."""
    failed = compile_cache.run_jobs(kernels, count, lambda done, total: report({"done": done, "total": total}))
    if failed:
        report({"error": f"{failed} of {len(kernels)} kernels did not compile"})
    return failed


def launch_all(folder: Path, options: EngineOptions) -> None:
    """Run all sizes of steps of a model of one layer of each kind, as `assemble` and the engine's start do."""
    exact_products()
    settings = read_config(folder)
    whole = settings.model
    stored = stored_dtype(whole, options)
    max_length = memory.check_length(whole, options)
    source = _few_layers(folder, settings, options)
    make: Callable[..., Decoder] = Decoder
    ops = plain_ops(options)
    if options.tensor_parallel > 1:
        source, ops, make = _of_first_rank(source, options)
    model = source.load(ops, max_length, options, lambda phase, done, total: None, make)
    if stored == kv_pages.FP8:
        _set_scales(model, folder, stored, options)
    guesses = MOST_GUESSES if options.speculate else 0
    adapters = None
    if options.adapter_room:
        adapters = GpuAdapters(model, 1, options.adapter_rank, options.step_tokens)
    runner = GpuRunner(
        model, ops, options.block_size, options.max_batch_size, max_length, options.step_tokens, stored, guesses,
        adapters,
    )  # fmt: skip
    runner.kv.allocate(_FEW_BLOCKS)
    if options.heads:
        _use_heads(runner, options, max_length)
    if options.draft:
        _use_draft(runner, plain_ops(options), locate_draft(options, folder, whole), options, max_length)
    runner.launch_all()
    staging.warm_up(runner.kv.layers)


def _use_heads(runner: GpuRunner, options: EngineOptions, max_length: int) -> None:
    """Let draft heads with random weights guess. They read the residual stream before the first layer, whatever they
    were trained to read: most layers are left out here."""
    config = read_heads(Path(options.heads).expanduser())
    config = replace(config, hidden_layers=(0,) * len(config.hidden_layers))
    dtype = dtype_of(options)
    runner.use_draft(DraftHeads(config, runner.model, dtype, max_length), dtype).allocate(_FEW_BLOCKS)


def _use_draft(runner: GpuRunner, ops: TritonOps, folder: Path, options: EngineOptions, max_length: int) -> None:
    """Let the draft model guess."""
    own = draft_options(options)
    source = _few_layers(folder, read_config(folder), own)
    config = source.config
    source = replace(source, head=draft_head(options, config.hidden_size))
    model = source.load(ops, min(max_length, config.context_length), own, lambda phase, done, total: None)
    runner.use_draft(model, stored_dtype(config, own)).allocate(_FEW_BLOCKS)


def _few_layers(folder: Path, settings: CheckpointConfig, options: EngineOptions) -> WeightSource:
    """A model of a few layers (`layer_kinds`). A quantized checkpoint's first layers say how theirs are laid out."""
    whole = settings.model
    kinds = layer_kinds(whole)
    config = with_layers(whole, kinds)
    reader = reader_of(settings.quantization, options.quantize)
    read = None
    if isinstance(reader, StoredWeights):
        checkpoint = open_family(folder, whole)
        read = _of_layers(checkpoint, kinds)
    return WeightSource(config, read, reader, settings.quantization)


def _of_first_rank(
    source: WeightSource, options: EngineOptions
) -> tuple[WeightSource, TritonOps, Callable[..., Decoder]]:
    """The part of the first of the tensor ranks, its operations, and how its model is made."""
    grid = Grid(options.tensor_parallel, spreads_experts=options.expert_parallel)
    device = torch.device("cuda", torch.cuda.current_device())
    others = UnconnectedCollectives(grid, peer_words_of(source.config, options, grid), device)
    shard = shard_of(sizes_of(source.config, quantized=source.reader is not None), grid, 0)
    make = partial(StageDecoder, shard=shard, others=others)
    return own_part(source, shard), rank_ops(options, others), make


def _of_layers(checkpoint: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The checkpoint of these layers alone, in this order."""
    headers = {}
    for name, header in checkpoint.headers.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            headers[name] = header
            continue
        for index, layer in enumerate(layers):
            if int(found[2]) == layer:
                headers[f"{found[1]}{index}{found[3]}"] = replace(header, stored_name=header.stored_name or name)
    return replace(checkpoint, headers=headers)


def _set_scales(model: Decoder, folder: Path, stored: torch.dtype, options: EngineOptions) -> None:
    """Scales of keys and values where the model will have some: kernels are compiled with or without."""
    if not presets.is_random(folder):
        load_kv_scales(model.layers, open_checkpoint(folder))
    if measures_scales(model, stored, options):
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

    def report(progress: dict[str, Any]) -> None:
        out.write(json.dumps(progress) + "\n")
        out.flush()

    try:
        good = compile_model(Path(order["folder"]), EngineOptions(**order["options"]), report)
    except Exception as error:  # Whatever it is, the engine can start without this process.
        report({"error": f"{type(error).__name__}: {error}"})
        good = False
    sys.stderr.flush()
    os._exit(0 if good else 1)  # CUDA's own end takes a second.


if __name__ == "__main__":
    main()
