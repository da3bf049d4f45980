"""Fills a model whose products have weights in fewer bits, module by module: the plain model is never whole in memory.

Knows modules and their readers, never a format.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from kernels import quantized_weights
from services.worker.errors import CheckpointError
from services.worker.loader.formats.module_tensors import ModuleTensors, Tensors
from services.worker.loader.formats.registry import RoundedWeights, StoredWeights, WeightReader
from services.worker.loader.kv_scales import is_scale
from services.worker.loader.plain import RANDOM_STD, is_norm_weight
from services.worker.loader.tensors import FLOATS, Checkpoint, TensorHeader
from services.worker.models.config import ModelConfig, count_embeddings, count_parameters
from services.worker.models.decoder import Decoder, Projection
from services.worker.models.weighted import WeightedModel
from services.worker.options import Progress

_GPU_THREADS = 4
_HEAD_ROWS = 1 << 14
"""Rows of a head that are rounded at a time: temporaries take several times their memory."""
_BITS = {"int8": 8, "int4": 4.25, "fp8": 8, "nf4": 4.5}


def load_quantized(model: WeightedModel, checkpoint: Checkpoint, reader: WeightReader, progress: Progress) -> None:
    """Fill a model whose linears are on the meta device, from files. Raises CheckpointError."""
    transposed = _transposed_weights(model, checkpoint)
    architecture = model.config.architecture
    if transposed and isinstance(reader, StoredWeights):
        raise CheckpointError(f"quantized checkpoints of {architecture} are not supported: serve the plain model")
    device = model.embedding.device
    headers = {name: _as_read(header, name in transposed) for name, header in checkpoint.headers.items()}
    with checkpoint.opened() as read:

        def fetch(name: str) -> Tensor:
            tensor = read(name).to(device)
            return tensor.t().contiguous() if name in transposed else tensor

        tensors = Tensors(headers, fetch)
        _fill(model, tensors, reader, progress)
        _check_all_taken(tensors, model)


def round_head(model: Decoder, kind: str) -> None:
    """Round a plain head, some of its rows at a time. If the head is the embedding, a copy is rounded: tokens are
    looked up in the plain one. kind: one of `quantized_weights.QUANTIZERS` that rounds each row by itself."""
    weight = model.head.weight
    if isinstance(weight, Tensor):
        parts = [quantized_weights.QUANTIZERS[kind](part) for part in torch.split(weight, _HEAD_ROWS)]
        model.head.set_weight(quantized_weights.concat(parts))


def copied_head_bytes(config: ModelConfig, kind: str) -> int:
    """Bytes that a rounded head takes beside a plain embedding that is the head."""
    return int(config.vocab_size * config.hidden_size * _BITS[kind] / 8) if config.tied_embeddings else 0


def _transposed_weights(model: WeightedModel, checkpoint: Checkpoint) -> set[str]:
    """Names of the weights that are stored as [inputs, outputs]. Raises CheckpointError if one has another shape."""
    names = set()
    for each in model.projections():
        for module, outputs in zip(each.modules, each.outputs, strict=True) if each.transposed else ():
            name, expected = f"{module}.weight", (each.linear.inputs, outputs)
            header = checkpoint.headers.get(name)
            if header is not None and header.shape != expected:
                shape = list(header.shape)
                raise CheckpointError(f"tensor {name} has shape {shape}, config.json says {list(expected)}")
            names.add(name)
    return names


def _as_read(header: TensorHeader, transposed: bool) -> TensorHeader:
    """The header of a weight as readers see it: [outputs, inputs]."""
    return replace(header, shape=header.shape[::-1]) if transposed else header


def randomize_quantized(model: WeightedModel, reader: RoundedWeights, progress: Progress) -> None:
    """Random weights, made on the model's device and rounded one by one; norms are ones."""
    generator = torch.Generator(model.embedding.device).manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, views in model.destinations().items():
        shapes[name] = tuple(views[0].shape)
    for projection in model.projections():
        for module, outputs in zip(projection.modules, projection.outputs, strict=True):
            shapes[f"{module}.weight"] = (outputs, projection.linear.inputs)
    dtype = model.embedding.dtype

    def make(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype, device=model.embedding.device)
        if is_norm_weight(name, tensor.ndim):
            return tensor.fill_(1)
        return tensor.normal_(0, RANDOM_STD, generator=generator)

    headers = {name: TensorHeader(shape, dtype) for name, shape in shapes.items()}
    _fill(model, Tensors(headers, make), reader, progress, threads=1)


def expected_bytes(
    config: ModelConfig, checkpoint: Checkpoint | None, reader: WeightReader, dtype: torch.dtype, device: str
) -> int:
    """Approximate bytes of the weights in memory, estimated before they are loaded."""
    if checkpoint and not isinstance(reader, RoundedWeights):
        return sum(_stored_bytes(name, checkpoint.headers, reader, dtype, device) for name in checkpoint.headers)
    assert isinstance(reader, RoundedWeights), reader
    parameters, embeddings = count_parameters(config), count_embeddings(config)
    small = device != "cpu" or reader.kind in ("int8", "int4")
    bits = _BITS[reader.kind] if small else 8 * dtype.itemsize
    return embeddings * dtype.itemsize + int((parameters - embeddings) * bits / 8)


def _stored_bytes(
    name: str, headers: Mapping[str, TensorHeader], reader: StoredWeights, dtype: torch.dtype, device: str
) -> int:
    """About what a tensor of a quantized checkpoint takes in memory. A CPU has FP8, NF4 and INT8 in groups as plain
    numbers."""
    header, expands = headers[name], device == "cpu"
    module, _, kind = name.rpartition(".")
    if expands and kind in ("weight", "weight_packed") and reader.is_grouped_int8(module):
        octets = header.dtype in (torch.int8, torch.int32)  # one number a byte, in words or not
        return header.nbytes * dtype.itemsize if octets else header.elements * dtype.itemsize
    if f"{name}.absmax" in headers:  # NF4: two numbers a byte
        return 2 * header.nbytes * dtype.itemsize if expands else header.nbytes
    plain = header.dtype in FLOATS or (expands and header.dtype == quantized_weights.FP8)
    return header.elements * dtype.itemsize if plain else header.nbytes


def _fill(
    model: WeightedModel, tensors: Tensors, reader: WeightReader, progress: Progress, threads: int | None = None
) -> None:
    projections = model.projections()
    for name, views in model.destinations().items():
        module, _, kind = name.rpartition(".")
        tensor = ModuleTensors(tensors, module).take_finite(kind, views[0].shape)
        for view in views:
            view.copy_(tensor)
    if threads is None:
        threads = 1 if model.embedding.device.type == "cpu" else _GPU_THREADS
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for done, _ in enumerate(pool.map(lambda each: _read(each, tensors, reader), projections)):
            progress("weights", done, len(projections))
    progress("weights", len(projections), len(projections))


def _read(projection: Projection, tensors: Tensors, reader: WeightReader) -> None:
    parts = [
        reader.read(ModuleTensors(tensors, module), outputs, projection.linear.inputs)
        for module, outputs in zip(projection.modules, projection.outputs, strict=True)
    ]
    projection.linear.set_weight(quantized_weights.concat(parts))


def _check_all_taken(tensors: Tensors, model: WeightedModel) -> None:
    """Raises CheckpointError for a tensor that no part of the model reads, unless it is a bias of zeros."""
    for name in sorted(tensors.headers.keys() - tensors.taken):
        is_known = model.family.tensor_name(name) is None or is_scale(name, model.config.layers)
        if is_known or (model.config.tied_embeddings and name.startswith("lm_head.")):
            continue
        if not name.endswith(".bias") or bool(tensors.fetch(name).any()):
            raise CheckpointError(f"tensor {name} is not part of this architecture")
