"""Builds the runner of a decoder that embeds or scores labels. Knows files and memory, no engine and no job."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.operands import Pooling
from services.worker.build import memory
from services.worker.build.encoders.source import free_bytes, supported
from services.worker.build.weights import WeightSource, bytes_of_block, dtype_of
from services.worker.errors import CheckpointError
from services.worker.kvcache.pages import make_layers
from services.worker.loader import presets
from services.worker.loader.family_tensors import open_family
from services.worker.loader.files import MOST_TOKENIZER_BYTES, _read_json, parse_json, read_bounded
from services.worker.loader.formats.registry import reader_of
from services.worker.loader.sentence_folder import SentenceSettings, read_sentence_settings
from services.worker.loader.tensors import open_checkpoint
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.encoders.config import TextDecoderConfig
from services.worker.models.encoders.family import read_head
from services.worker.models.family import Part
from services.worker.models.raw_config import RawConfig
from services.worker.models.registry import causal_name, family_of
from services.worker.options import EngineOptions, Progress
from services.worker.runners.base import EncoderRunner

_SCORES = "score.weight"
"""The head of ForSequenceClassification [labels, hidden]."""
_ENGINES = ("auto", "torch", "gpu")


@dataclass(frozen=True, slots=True)
class DecoderSource:
    """The folder of a decoder that embeds or scores labels: all that it states but its weights."""

    folder: Path
    raw: RawConfig
    config: TextDecoderConfig
    settings: SentenceSettings


def read_decoder_source(folder: Path, raw: RawConfig) -> DecoderSource:
    """Read the JSON files of a folder beside its config.json. Raises CheckpointError."""
    name = causal_name(raw.architecture)
    if name is None:
        raise CheckpointError(f"{raw.architecture} is not supported as an embedder; supported are {supported()}")
    _refuse(raw)
    _check_end(folder)
    decoder = family_of(name).read_config(RawConfig({**raw.values, "architectures": [name]}))
    if decoder.moe is not None:
        raise CheckpointError(f"mixtures of experts ({raw.architecture}) are not supported as embedders")
    # A head over the vocabulary is not read: it counts as the embedding.
    config = TextDecoderConfig(raw.architecture, replace(decoder, tied_embeddings=True), read_head(raw, ""))
    settings = read_sentence_settings(folder)
    return DecoderSource(folder, raw, config, replace(settings, pooling=Pooling.LAST) if config.head else settings)


@dataclass(frozen=True, slots=True)
class _Room:
    """What a worker has room for."""

    most_length: int
    """Tokens of a text."""
    most_tokens: int
    """Tokens of a batch."""
    blocks: int
    """Of keys and values, for the tokens of a batch in blocks that no two texts share."""


def make_decoder_runner(
    source: DecoderSource, most_length: int, most_tokens: int, options: EngineOptions, progress: Progress
) -> tuple[EncoderRunner[Any], int]:
    """The runner with its weights on the options' device, for texts of up to `most_length` tokens, and the numbers in
    the checkpoint. Raises CheckpointError."""
    if options.engine not in _ENGINES:
        raise CheckpointError(
            f"ENGINE={options.engine} does not serve decoders as embedders: set ENGINE=torch or ENGINE=gpu"
        )
    weights, config, dtype = _weights(source, options), source.config.decoder, dtype_of(options)
    blocks = -(-most_tokens // options.block_size) + options.max_batch_size
    needed = blocks * bytes_of_block(config, options, dtype)
    expected = weights.expected_bytes(dtype, "cuda" if options.on_gpu else "cpu")
    free = free_bytes(options)
    memory.check_weights(expected, free, options)
    if expected + needed > free:
        raise CheckpointError(
            f"keys and values of {most_tokens} tokens take {needed >> 20} MiB, {(free - expected) >> 20} MiB are free: "
            "set MAX_SEQ_LENGTH and WEFT_STEP_TOKENS"
        )
    make = _on_gpu if options.on_gpu else _on_cpu
    return make(source, weights, _Room(most_length, most_tokens, blocks), options, progress), weights.parameters


def _refuse(raw: RawConfig) -> None:
    """Raises CheckpointError for a decoder whose vectors are computed in another way."""
    if raw.get("auto_map"):
        raise CheckpointError("auto_map: the checkpoint brings code of its own, which is not run")
    if raw.flag("use_bidirectional_attention") or not raw.flag("is_causal", default=True):
        raise CheckpointError("a decoder whose tokens see later ones is not supported as an embedder")


def _check_end(folder: Path) -> None:
    """Raises CheckpointError if texts are to end with a token that tokenizer.json does not add, but transformers does:
    the vector of the last token counts."""
    settings, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.exists() and RawConfig(_read_json(settings), settings.name).flag("add_eos_token")):
        return
    if not tokenizer.exists():
        return
    content = parse_json(read_bounded(tokenizer, MOST_TOKENIZER_BYTES), tokenizer.name)
    if isinstance(content, dict) and not _ends_texts(content.get("post_processor")):
        raise CheckpointError(
            "tokenizer_config.json says add_eos_token, and tokenizer.json adds no token behind a text: save the "
            "tokenizer with transformers again"
        )


def _ends_texts(processor: Any) -> bool:
    """Whether the post-processor of a tokenizer.json puts a special token behind a single text."""
    if not isinstance(processor, dict):
        return False
    parts = processor.get("processors")
    if isinstance(parts, list):
        return any(_ends_texts(part) for part in parts)
    template = processor.get("single")
    return isinstance(template, list) and bool(template) and "SpecialToken" in template[-1]


def _weights(source: DecoderSource, options: EngineOptions) -> WeightSource:
    quantization = source.raw.section("quantization_config").values or None
    config, checkpoint = source.config.decoder, None
    if not presets.is_random(source.folder):
        checkpoint = open_family(source.folder, config, _tensor_names(config))
    return WeightSource(config, checkpoint, reader_of(quantization, options.quantize), quantization)


def _tensor_names(config: ModelConfig) -> Callable[[str], str | None]:
    """The names that the family's tables give tensors; those of a model without a head lack the first part."""
    family = family_of(config.architecture)
    (embedding,) = (names.modules[0] for names in family.outside if names.part is Part.EMBEDDING)
    first = embedding.partition(".")[0]

    def name_of(stored: str) -> str | None:
        name = None if stored == _SCORES else family.tensor_name(stored)
        has_first = name is None or name.startswith((f"{first}.", "lm_head."))
        return name if has_first else family.tensor_name(f"{first}.{stored}")

    return name_of


def _on_cpu(
    source: DecoderSource, weights: WeightSource, room: _Room, options: EngineOptions, progress: Progress
) -> EncoderRunner[Any]:
    from services.worker.runners.cpu.decoder_texts import DecoderTextRunner
    from services.worker.runners.cpu.ops import ReferenceOps
    from services.worker.runners.cpu.steps import StepBuilder

    ops = ReferenceOps()
    model = weights.load(ops, room.most_length, options, progress)
    pools = make_layers(model.config, room.blocks, options.block_size, model.embedding.dtype, "cpu")
    steps = StepBuilder(model, ops, options.block_size)
    return DecoderTextRunner(steps, pools, room.most_tokens, source.settings.pooling, _read_labels(source, model))


def _on_gpu(
    source: DecoderSource, weights: WeightSource, room: _Room, options: EngineOptions, progress: Progress
) -> EncoderRunner[Any]:
    from services.worker.runners.cuda.encoders.decoder_network import DecoderNetwork
    from services.worker.runners.cuda.encoders.runner import GpuTextRunner
    from services.worker.runners.cuda.ops import TritonOps, exact_products

    exact_products()
    ops, most_texts = TritonOps(), options.max_batch_size
    model = weights.load(ops, room.most_length, options, progress)
    pools = make_layers(model.config, room.blocks, options.block_size, model.embedding.dtype, model.embedding.device)
    labels = _read_labels(source, model)
    network = DecoderNetwork(model, ops, pools, room.most_length, most_texts, source.settings.pooling, labels)
    runner = GpuTextRunner(network, room.most_tokens, most_texts)
    runner.warm_up(lambda done, total: progress("graphs", done, total))
    return runner


def _read_labels(source: DecoderSource, model: Decoder) -> Tensor | None:
    """The weights of the head on the model's device; None: there is none. Raises CheckpointError."""
    config = source.config
    if config.head is None:
        return None
    at = model.embedding
    shape = (len(config.head.labels), config.hidden_size)
    if presets.is_random(source.folder):
        return torch.empty(shape).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).to(at)
    checkpoint = open_checkpoint(source.folder)
    if _SCORES not in checkpoint.headers:
        raise CheckpointError(f"tensor {_SCORES} is missing")
    if tuple(checkpoint.headers[_SCORES].shape) != shape:
        found = list(checkpoint.headers[_SCORES].shape)
        raise CheckpointError(f"tensor {_SCORES} has shape {found}, config.json says {list(shape)}")
    with checkpoint.opened() as read:
        return read(_SCORES).to(at)
