"""Builds the engine of an encoder, or of a decoder that embeds: reads its folder, loads its weights, warms it up. Knows
no jobs and no mesh."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.host import available_cores
from services.worker.build import refused
from services.worker.build.encoders.decoders import DecoderSource, make_decoder_runner, read_decoder_source
from services.worker.build.encoders.source import EncoderSource, read_raw, read_source
from services.worker.build.torch_recorder import TorchRecorder
from services.worker.engine.base import CLASSIFY, EMBED, RANK
from services.worker.engine.encoding import EncodingEngine
from services.worker.engine.finish_vectors import ScoreKind
from services.worker.errors import CheckpointError
from services.worker.loader.sentence_folder import SentenceSettings
from services.worker.models.encoders.config import HeadConfig, TextModelConfig
from services.worker.models.encoders.registry import encoder_family
from services.worker.models.raw_config import RawConfig
from services.worker.options import RUNTIMES, EngineOptions, Progress
from services.worker.planner.dynamic_batch import DynamicBatch
from services.worker.runners.base import EncoderRunner
from services.worker.runners.lone_texts import LoneTextRunner

_NO_ENCODERS = ("tensorrt", "compile", "paced")
"""Engines that compute decoders alone."""
_LEAST_LANES, _MOST_LANES = 2, 4
"""Batches that an encoder in torch on a CPU computes at a time."""
_CORES_OF_A_LANE = 4
"""More cores make more lanes, as far as there may be more: four threads wait less for one another than eight."""


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """An encoder's engine that is ready to run, and what its folder states."""

    engine: EncodingEngine
    config: TextModelConfig
    settings: SentenceSettings
    dimensions: tuple[int, ...]
    """Fewer dimensions that its vectors may be cut to; (0,): any number."""
    most_length: int
    """Most tokens of a text."""
    parameters: int
    computed_by: str
    """The engines that compute."""


def build_encoder(folder: Path, options: EngineOptions, progress: Progress) -> BuiltEncoder:
    """Load the checkpoint in this folder and warm the engine up. Raises CheckpointError."""
    _check_options(options)
    progress("checkpoint", 0, 1)
    source = _read_source(folder)
    lanes = _lanes(source, options)
    if threads := options.threads or (0 if options.on_gpu else _default_threads(lanes)):
        torch.set_num_threads(threads)
    config, length = source.config, _most_length(source.config, source.settings, options)
    progress("checkpoint", 1, 1)
    runner, parameters = _make_runner(source, length, options, progress)
    batch = DynamicBatch(runner.most_tokens, options.max_batch_size, options.max_wait_ms / 1e3)
    tasks, kind = _tasks(config.head), _score_kind(config.head)
    engine = EncodingEngine(runner, tasks, length, batch, kind, TorchRecorder, lanes)
    progress("warm-up", 0, 1)
    engine.warm_up()
    progress("warm-up", 1, 1)
    dimensions = _read_dimensions(source.raw, config)
    return BuiltEncoder(engine, config, source.settings, dimensions, length, parameters, _names(runner, options))


def _names(runner: EncoderRunner[Any], options: EngineOptions) -> str:
    """The engines of a runner, as `weft models` shows them."""
    if isinstance(runner, LoneTextRunner):
        return "torch+onnxruntime"
    return "torch" if options.engine == "auto" else options.engine


def _read_source(folder: Path) -> EncoderSource | DecoderSource:
    raw = read_raw(folder)
    return (read_source if encoder_family(raw.architecture) else read_decoder_source)(folder, raw)


def _lanes(source: EncoderSource | DecoderSource, options: EngineOptions) -> int:
    """Batches that are computed at the same time. Threads of one batch wait for one another, those of two do not: where
    messages take a core for a moment, they delay one batch alone."""
    if isinstance(source, DecoderSource) or options.on_gpu or options.engine in RUNTIMES:
        return 1
    cores = available_cores()
    if options.threads:
        return max(1, min(_MOST_LANES, cores // options.threads))
    return min(max(_LEAST_LANES, min(_MOST_LANES, cores // _CORES_OF_A_LANE)), cores)


def _default_threads(lanes: int) -> int:
    """Threads of a batch: torch's choice, at most a lane's share of the cores; one lane leaves a core to the messages,
    which take as long as a text's network."""
    cores = available_cores()
    return max(1, min(torch.get_num_threads(), cores // lanes if lanes > 1 else cores - 1))


def _check_options(options: EngineOptions) -> None:
    """Raises CheckpointError for what an encoder does not support."""
    if options.engine in _NO_ENCODERS:
        raise CheckpointError(f"ENGINE={options.engine} does not serve encoders: set ENGINE=torch or ENGINE=gpu")
    refused.check("an encoder", refused.of_encoder(options))
    if options.engine in RUNTIMES:
        refused.check(f"ENGINE={options.engine}", refused.of_runtime_encoder(options))


def _make_runner(
    source: EncoderSource | DecoderSource, most_length: int, options: EngineOptions, progress: Progress
) -> tuple[EncoderRunner[Any], int]:
    """The runner, and the numbers in the checkpoint. Only what the engine needs is imported."""
    most_tokens = max(options.step_tokens, most_length)
    if isinstance(source, DecoderSource):
        return make_decoder_runner(source, most_length, most_tokens, options, progress)
    if options.engine in RUNTIMES:
        from services.worker.build.encoders.runtimes import make_runtime_runner

        return make_runtime_runner(source, most_tokens, options, progress)
    if options.on_gpu:
        from services.worker.runners.cuda.encoders.encoder_network import EncoderNetwork
        from services.worker.runners.cuda.encoders.ops import TritonEncoderOps
        from services.worker.runners.cuda.encoders.runner import GpuTextRunner
        from services.worker.runners.cuda.ops import exact_products

        exact_products()
        model, parameters = source.load(TritonEncoderOps(), options, progress)
        runner = GpuTextRunner(EncoderNetwork(model), most_tokens, options.max_batch_size)
        runner.warm_up(lambda done, total: progress("graphs", done, total))
        return runner, parameters
    from services.worker.build.encoders.lone_texts import with_lone_texts
    from services.worker.runners.cpu.encoder_ops import CpuEncoderOps
    from services.worker.runners.cpu.encoder_runner import CpuEncoderRunner

    model, parameters = source.load(CpuEncoderOps(), options, progress)
    return with_lone_texts(CpuEncoderRunner(model, most_tokens), source, options), parameters


def _most_length(config: TextModelConfig, settings: SentenceSettings, options: EngineOptions) -> int:
    most = config.context_length
    if most < 1:
        raise CheckpointError("config.json: the table of positions leaves none for a token")
    if options.max_seq_length and options.max_seq_length > most:
        raise CheckpointError(f"max_seq_length {options.max_seq_length} exceeds the model's context of {most}")
    return options.max_seq_length or min(most, settings.max_length or most)


def _read_dimensions(raw: RawConfig, config: TextModelConfig) -> tuple[int, ...]:
    """`matryoshka_dimensions`, or any number with `is_matryoshka`, as vLLM reads them; empty: none."""
    listed = raw.get("matryoshka_dimensions")
    if listed is None:
        return (0,) if raw.flag("is_matryoshka") else ()
    sizes = listed if isinstance(listed, list) else [None]
    if not all(type(size) is int and 0 < size <= config.hidden_size for size in sizes):
        raise CheckpointError(
            f"config.json: matryoshka_dimensions must be a list of numbers up to {config.hidden_size}"
        )
    return tuple(sizes)


def _tasks(head: HeadConfig | None) -> frozenset[str]:
    if head is None:
        return frozenset({EMBED})
    return frozenset({RANK if len(head.labels) == 1 else CLASSIFY})


def _score_kind(head: HeadConfig | None) -> ScoreKind | None:
    if head is None:
        return None
    return "sigmoid" if head.multi_label or len(head.labels) == 1 else "softmax"
