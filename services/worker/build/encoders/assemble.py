"""Builds the engine of an encoder: reads its folder, loads its weights, warms it up. Knows no jobs and no mesh."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.host import available_cores, available_memory
from services.worker.build import memory, refused
from services.worker.build.torch_recorder import TorchRecorder
from services.worker.engine.base import CLASSIFY, EMBED, RANK
from services.worker.engine.encoding import EncodingEngine
from services.worker.engine.finish_vectors import ScoreKind
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.files import _read_json
from services.worker.loader.formats.registry import RoundedWeights, WeightReader, reader_of
from services.worker.loader.plain import load_weights, pack_weights, randomize
from services.worker.loader.quantized import load_quantized, randomize_quantized
from services.worker.loader.sentence_folder import SentenceSettings, read_sentence_settings
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.encoders.config import EncoderConfig, HeadConfig
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.family import EncoderFamily
from services.worker.models.encoders.registry import ENCODERS, encoder_family
from services.worker.models.raw_config import RawConfig
from services.worker.options import EngineOptions, Progress
from services.worker.planner.dynamic_batch import DynamicBatch
from services.worker.runners.base import EncoderRunner

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """An encoder's engine that is ready to run, and what its folder states."""

    engine: EncodingEngine
    config: EncoderConfig
    settings: SentenceSettings
    dimensions: tuple[int, ...]
    """Fewer dimensions that its vectors may be cut to; (0,): any number."""
    most_length: int
    """Most tokens of a text."""
    parameters: int


def build_encoder(folder: Path, options: EngineOptions, progress: Progress) -> BuiltEncoder:
    """Load the checkpoint in this folder and warm the engine up. Raises CheckpointError."""
    _check_options(options)
    if threads := options.threads or (0 if options.on_gpu else _default_threads()):
        torch.set_num_threads(threads)
    progress("checkpoint", 0, 1)
    raw = _read_raw(folder)
    family = encoder_family(raw.architecture)
    if family is None:
        supported = ", ".join(name for each in ENCODERS for name in each.architectures)
        raise CheckpointError(f"{raw.architecture} is not supported as an embedder; supported are {supported}")
    config, settings = family.read_config(raw), read_sentence_settings(folder)
    length = _most_length(config, settings, options)
    reader = reader_of(raw.section("quantization_config").values or None, options.quantize)
    checkpoint = _open(folder, family, config.head is not None)
    progress("checkpoint", 1, 1)
    if checkpoint is not None:
        memory.check_weights(_expected_bytes(checkpoint, options), _free_bytes(options), options)
    model = _new_model(config, family, settings, reader is not None, options)
    _load(model, checkpoint, reader, progress)
    runner = _new_runner(model, max(options.step_tokens, length), options, progress)
    batch = DynamicBatch(runner.most_tokens, options.max_batch_size, options.max_wait_ms / 1e3)
    engine = EncodingEngine(runner, _tasks(config.head), length, batch, _score_kind(config.head), TorchRecorder)
    progress("warm-up", 0, 1)
    engine.warm_up()
    progress("warm-up", 1, 1)
    parameters = checkpoint.parameters if checkpoint is not None else 0
    return BuiltEncoder(engine, config, settings, _read_dimensions(raw, config), length, parameters)


def _default_threads() -> int:
    """Torch's choice, at most all cores but one: the messages of a text take as long as its network."""
    return max(1, min(torch.get_num_threads(), available_cores() - 1))


def _check_options(options: EngineOptions) -> None:
    """Raises CheckpointError for what an encoder does not support."""
    if options.engine not in ("auto", "torch", "gpu"):
        raise CheckpointError(f"ENGINE={options.engine} does not serve encoders: set ENGINE=torch or ENGINE=gpu")
    refused.check("an encoder", refused.of_encoder(options))


def _new_model(
    config: EncoderConfig, family: EncoderFamily, settings: SentenceSettings, quantized: bool, options: EngineOptions
) -> Encoder:
    """The network without its weights. Only what the device needs is imported."""
    dtype = _DTYPES[options.numerics.dtype]
    if options.on_gpu:
        from services.worker.runners.cuda.encoders.ops import TritonEncoderOps
        from services.worker.runners.cuda.ops import exact_products

        exact_products()
        return Encoder(config, family, TritonEncoderOps(), dtype, settings.pooling, "cuda", meta_linears=quantized)
    from services.worker.runners.cpu.encoder_ops import CpuEncoderOps

    return Encoder(config, family, CpuEncoderOps(), dtype, settings.pooling, meta_linears=quantized)


def _new_runner(model: Encoder, most_tokens: int, options: EngineOptions, progress: Progress) -> EncoderRunner[Any]:
    if options.on_gpu:
        from services.worker.runners.cuda.encoders.runner import GpuEncoderRunner

        runner = GpuEncoderRunner(model, most_tokens, options.max_batch_size)
        runner.warm_up(lambda done, total: progress("graphs", done, total))
        return runner
    from services.worker.runners.cpu.encoder_runner import CpuEncoderRunner

    return CpuEncoderRunner(model, most_tokens)


def _free_bytes(options: EngineOptions) -> int:
    return int(torch.cuda.mem_get_info()[0]) if options.on_gpu else available_memory()


def _read_raw(folder: Path) -> RawConfig:
    return RawConfig(_read_json(folder / "config.json"))


def _most_length(config: EncoderConfig, settings: SentenceSettings, options: EngineOptions) -> int:
    most = config.context_length
    if most < 1:
        raise CheckpointError(f"config.json: {config.positions} positions leave none for a token")
    if options.max_seq_length and options.max_seq_length > most:
        raise CheckpointError(f"max_seq_length {options.max_seq_length} exceeds the model's context of {most}")
    return options.max_seq_length or min(most, settings.max_length or most)


def _read_dimensions(raw: RawConfig, config: EncoderConfig) -> tuple[int, ...]:
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


def _open(folder: Path, family: EncoderFamily, scores: bool) -> Checkpoint | None:
    """None: the weights are random."""
    if presets.is_random(folder):
        return None
    return open_checkpoint(folder).renamed(family.tensor_name if scores else family.tensor_name_without_head)


def _expected_bytes(checkpoint: Checkpoint, options: EngineOptions) -> int:
    """About the bytes that the weights take, without what rounding saves."""
    return checkpoint.parameters * _DTYPES[options.numerics.dtype].itemsize


def _load(model: Encoder, checkpoint: Checkpoint | None, reader: WeightReader | None, progress: Progress) -> None:
    if checkpoint is not None and reader is not None:
        load_quantized(model, checkpoint, reader, progress)
    elif checkpoint is not None:
        load_weights(model, checkpoint, progress)
    elif isinstance(reader, RoundedWeights):
        randomize_quantized(model, reader, progress)
    else:
        randomize(model, progress)
    pack_weights(model)
