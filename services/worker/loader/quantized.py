"""Fills a model whose products have weights in fewer bits: module by module, so that the plain model is never whole."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kernels import quantized_weights
from services.worker.errors import CheckpointError
from services.worker.loader.formats.module_tensors import ModuleTensors, Tensors
from services.worker.loader.formats.registry import RoundedWeights, StoredWeights, WeightReader
from services.worker.loader.kv_scales import is_scale
from services.worker.loader.plain import RANDOM_STD
from services.worker.loader.tensors import FLOATS, Checkpoint, TensorHeader
from services.worker.models.config import ModelConfig, count_embeddings, count_parameters
from services.worker.models.decoder import Decoder, Projection
from services.worker.options import Progress

_GPU_THREADS = 4
_BITS = {"int8": 8, "int4": 4.25, "fp8": 8, "nf4": 4.5}


def load_quantized(model: Decoder, checkpoint: Checkpoint, reader: WeightReader, progress: Progress) -> None:
    """Fill a hollow model from files. Raises CheckpointError."""
    device = model.embedding.device
    with checkpoint.opened() as read:
        tensors = Tensors(checkpoint.headers, lambda name: read(name).to(device))
        _fill(model, tensors, reader, progress)
        _check_all_taken(tensors, model.config.layers, model.config.tied_embeddings)


def randomize_quantized(model: Decoder, reader: RoundedWeights, progress: Progress) -> None:
    """Random weights for a hollow model, made on its device and rounded one by one; norms are ones."""
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
        return tensor.fill_(1) if "norm" in name else tensor.normal_(0, RANDOM_STD, generator=generator)

    headers = {name: TensorHeader(shape, dtype) for name, shape in shapes.items()}
    _fill(model, Tensors(headers, make), reader, progress, threads=1)


def expected_bytes(
    config: ModelConfig, checkpoint: Checkpoint | None, reader: WeightReader, dtype: torch.dtype, device: str
) -> int:
    """About what the weights will take, known before they are loaded."""
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
    model: Decoder, tensors: Tensors, reader: WeightReader, progress: Progress, threads: int | None = None
) -> None:
    places, projections = model.destinations(), model.projections()
    for name, views in places.items():
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
    projection.linear.take(quantized_weights.concat(parts))


def _check_all_taken(tensors: Tensors, layers: int, tied: bool) -> None:
    """Raises CheckpointError for a tensor that nothing of the model needs; a bias of zeros is no harm."""
    for name in sorted(tensors.headers.keys() - tensors.taken):
        known = name.endswith(".rotary_emb.inv_freq") or is_scale(name, layers)
        if known or (tied and name.startswith("lm_head.")):
            continue
        if not name.endswith(".bias") or bool(tensors.fetch(name).any()):
            raise CheckpointError(f"tensor {name} is not part of this architecture")
