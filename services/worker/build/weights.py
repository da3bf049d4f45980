"""Where the weights of a model come from, the formats and bytes that it takes on its device, and the bytes that are
free there. Knows checkpoints, no runner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels import kv_pages
from services.worker.build.drafting.draft import draft_head, draft_options, locate_draft
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.config import read_config
from services.worker.loader.family_tensors import has_own_head, open_family
from services.worker.loader.formats.registry import RoundedWeights, StoredWeights, WeightReader, reader_of
from services.worker.loader.kv_scales import load_kv_scales
from services.worker.loader.plain import load_weights, pack_weights, randomize
from services.worker.loader.quantized import (
    copied_head_bytes,
    expected_bytes,
    load_quantized,
    randomize_quantized,
    round_head,
)
from services.worker.loader.tensors import Checkpoint
from services.worker.models.config import ModelConfig, count_parameters
from services.worker.models.decoder import Decoder
from services.worker.models.ops import Ops
from services.worker.options import EngineOptions, Progress

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of the weights."""

    config: ModelConfig
    checkpoint: Checkpoint | None
    """None: the weights are random."""
    reader: WeightReader | None
    """Reads the weights of linear layers; None: they are plain."""
    quantization: Mapping[str, Any] | None
    """The quantization_config of config.json."""
    head: str | None = None
    """The format that a plain head is rounded to; None: it stays as it is."""

    @property
    def parameters(self) -> int:
        """Numbers in the checkpoint."""
        if self.checkpoint and not isinstance(self.reader, StoredWeights):
            return self.checkpoint.parameters
        return count_parameters(self.config)

    def expected_bytes(self, dtype: torch.dtype, device: str) -> int:
        """About the bytes that the weights will take."""
        copied = copied_head_bytes(self.config, self.head) if self.head else 0
        if self.reader is None:
            return copied + self.parameters * dtype.itemsize
        return copied + expected_bytes(self.config, self.checkpoint, self.reader, dtype, device)

    def load(
        self,
        ops: Ops,
        max_length: int,
        options: EngineOptions,
        progress: Progress,
        make: Callable[..., Decoder] = Decoder,
    ) -> Decoder:
        """The model with its weights. make: a decoder, or a part of one. Raises CheckpointError."""
        device = "cuda" if options.on_gpu else "cpu"
        is_quantized = self.reader is not None
        model = make(self.config, ops, dtype_of(options), max_length, device, meta_linears=is_quantized)
        if self.checkpoint and self.reader:
            load_quantized(model, self.checkpoint, self.reader, progress)
        elif isinstance(self.reader, RoundedWeights):
            randomize_quantized(model, self.reader, progress)
        elif self.checkpoint is None:
            randomize(model, progress)
        elif device == "cpu" or self.checkpoint.is_part:
            load_weights(model, self.checkpoint, progress)
        else:
            from services.worker.loader.streaming import stream_weights

            stream_weights(model, self.checkpoint, progress)
        if self.checkpoint:
            model.add_norm_offset()
        if self.checkpoint and stored_dtype(self.config, options) == kv_pages.FP8:
            load_kv_scales(model.layers, self.checkpoint)
        if self.head:
            round_head(model, self.head)
        if device == "cpu":
            pack_weights(model)
        return model


def open_source(model_dir: Path, options: EngineOptions) -> WeightSource:
    """The source of the weights of a folder. Raises CheckpointError."""
    settings = read_config(model_dir)
    config, reader = settings.model, reader_of(settings.quantization, options.quantize)
    checkpoint = None
    if not presets.is_random(model_dir):
        checkpoint = open_family(model_dir, config)
        if config.tied_embeddings and has_own_head(checkpoint, config):
            config = replace(config, tied_embeddings=False)
    return WeightSource(config, checkpoint, reader, settings.quantization, options.quantize_head)


def open_draft(model_dir: Path, config: ModelConfig, options: EngineOptions) -> WeightSource | None:
    """The source of the weights of the draft model for the model in this folder; None: there is none. Raises
    CheckpointError."""
    if not options.draft:
        return None
    draft = open_source(locate_draft(options, model_dir, config), draft_options(options))
    return replace(draft, head=draft_head(options, draft.config.hidden_size))


def dtype_of(options: EngineOptions) -> torch.dtype:
    """The format of weights and activations."""
    return _DTYPES[options.numerics.dtype]


def stored_dtype(config: ModelConfig, options: EngineOptions) -> torch.dtype:
    """The format of stored keys and values. Raises CheckpointError if the device does not support it."""
    name = config.kv_dtype if options.kv_dtype == "auto" else options.kv_dtype
    stored = {"fp8": kv_pages.FP8, "int8": kv_pages.INT8}.get(name, dtype_of(options))
    if stored == kv_pages.FP8 and options.on_gpu and torch.cuda.get_device_capability() < (8, 9):
        raise CheckpointError("keys and values in fp8 need a GPU of compute capability 8.9 or more: set KV_DTYPE=int8")
    return stored


def bytes_of_block(config: ModelConfig, options: EngineOptions, stored: torch.dtype) -> int:
    """Bytes of one block's keys and values, all layers."""
    return config.layers * kv_pages.page_bytes(options.block_size, config.kv_heads, config.head_dim, stored)


def free_gpu_bytes() -> int:
    """Bytes that are free on this process's GPU."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
