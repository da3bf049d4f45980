"""A checkpoint as one rank sees it: tensors of its layers alone, and of each the rows or columns that it has.

Knows in which dimension of a tensor a module's outputs and inputs are, for every format that is read; no layer.
"""

from collections.abc import Mapping
from dataclasses import replace

from kernels.quantized_weights import FP8_BLOCK
from services.worker.errors import CheckpointError
from services.worker.loader.kv_scales import is_scale, own_scale
from services.worker.loader.tensors import Checkpoint, TensorHeader, TensorPart
from services.worker.models.family import Split
from services.worker.models.sharding import ModulePiece
from services.worker.parallel.shards import Shard, Span

_DIMENSIONS: Mapping[str, tuple[int | None, int | None]] = {
    "weight": (0, 1),
    "bias": (0, None),
    "weight_packed": (0, 1),
    "weight_scale": (0, 1),
    "weight_scale_inv": (0, 1),
    "weight_zero_point": (0, 1),
    "weight_g_idx": (None, 0),
    "input_scale": (None, None),
    "qweight": (1, 0),
    "scales": (1, 0),
    "qzeros": (1, 0),
    "g_idx": (None, 0),
}
"""The dimensions of a module's outputs and of its inputs in its tensors."""
_SCALES = {"g_idx": ("scales", 0), "weight_g_idx": ("weight_scale", 1)}
"""Where the number of groups is found that a tensor counts: the tensor and its dimension."""
_SHAPE = "weight_shape"
"""This tensor repeats a shape of config.json: that of the whole module."""


def sharded(checkpoint: Checkpoint, pieces: Mapping[str, ModulePiece], shard: Shard, *, rounds: bool) -> Checkpoint:
    """The tensors of a rank, by their names in its model. rounds: the weights are rounded while they load, so that rows
    are read whole where ranks share a row: they share its scale. Raises CheckpointError for what cannot be split."""
    headers: dict[str, TensorHeader] = {}
    for stored, header in checkpoint.headers.items():
        found = _piece(stored, pieces)
        if found is None:
            scale = own_scale(stored, header.elements, shard.layers, shard.kv_heads, shard.ranks)
            if scale is not None:
                name, span = scale
                part = None if span is None else TensorPart(0, (span,))
                headers[name] = _local(header, stored, part)
            continue
        piece, kind = found
        if kind == _SHAPE and piece.spans:
            continue
        whole = rounds and piece.split is Split.ROW and kind == "weight"
        if whole and piece.transposed:
            raise CheckpointError(f"{stored}: weights stored as [inputs, outputs] cannot be rounded on several ranks")
        part = None if whole else _part(stored, kind, header, piece, checkpoint.headers)
        headers[f"{piece.name}.{kind}"] = _local(header, stored, part)
    return replace(checkpoint, headers=headers)


def unknown_tensor(checkpoint: Checkpoint, pieces: Mapping[str, ModulePiece], layers: int, tied: bool) -> str:
    """The name of a tensor that belongs to no piece of any rank; empty if there is none. pieces: those of all ranks."""
    for name in checkpoint.headers:
        if _piece(name, pieces) is None and not is_scale(name, layers) and not (tied and name.startswith("lm_head.")):
            return name
    return ""


def whole_rows(pieces: Mapping[str, ModulePiece]) -> dict[str, tuple[Span, int]]:
    """By module of the rank's model: which inputs it has of how many, where ranks share rows."""
    return {piece.name: (piece.spans[0], piece.total) for piece in pieces.values() if piece.split is Split.ROW}


def _piece(stored: str, pieces: Mapping[str, ModulePiece]) -> tuple[ModulePiece, str] | None:
    """The rank's piece of the module that a tensor belongs to, and the tensor's name in the module."""
    at = stored.rfind(".")
    while at > 0:
        piece = pieces.get(stored[:at])
        if piece is not None:
            return piece, stored[at + 1 :]
        at = stored.rfind(".", 0, at)
    return None


def _local(header: TensorHeader, stored: str, part: TensorPart | None) -> TensorHeader:
    shape = list(header.shape)
    if part is not None:
        shape[part.dimension] = sum(span.count for span in part.spans)
    return replace(header, shape=tuple(shape), stored_name=header.stored_name or stored, part=part)


def _part(
    stored: str, kind: str, header: TensorHeader, piece: ModulePiece, headers: Mapping[str, TensorHeader]
) -> TensorPart | None:
    """Which part of a tensor the rank has; None: all of it."""
    if not piece.spans:
        return None
    if kind not in _DIMENSIONS:
        raise CheckpointError(f"tensor {stored} cannot be shared by tensor ranks")
    dimensions = _DIMENSIONS[kind]
    if kind == "weight" and piece.transposed:
        dimensions = (1, 0)
    dimension = dimensions[piece.split is Split.ROW]
    if dimension is None or dimension >= len(header.shape) or header.shape[dimension] == 1:
        return None
    unit = _unit(stored, piece.total, header.shape[dimension])
    spans = tuple(_whole_units(stored, span, piece.total, unit) for span in piece.spans)
    return TensorPart(dimension, spans, _first_group(stored, kind, piece, headers))


def _unit(stored: str, total: int, size: int) -> int:
    """How many outputs or inputs an entry of a tensor is for."""
    if total % size == 0:
        return total // size
    if size == -(-total // FP8_BLOCK):
        return FP8_BLOCK
    raise CheckpointError(f"tensor {stored} has {size} entries for {total} numbers: ranks cannot share it")


def _whole_units(stored: str, span: Span, total: int, unit: int) -> Span:
    """The entries of a tensor for a span of numbers: whole ones, or the one that the span is in."""
    begins, ends = span.start % unit == 0, span.stop % unit == 0 or span.stop == total
    if (begins and ends) or span.start // unit == (span.stop - 1) // unit:
        return Span(span.start // unit, -(-span.stop // unit))
    raise CheckpointError(
        f"tensor {stored} has an entry for {unit} numbers, of which a tensor rank would have a part: take fewer ranks"
    )


def _first_group(stored: str, kind: str, piece: ModulePiece, headers: Mapping[str, TensorHeader]) -> int:
    """The group of the rank's first input in a tensor that names the group of each input; else 0."""
    if kind not in _SCALES:
        return 0
    name, dimension = _SCALES[kind]
    scales = headers.get(f"{stored.removesuffix(kind)}{name}")
    groups = scales.shape[dimension] if scales is not None and len(scales.shape) == 2 else 1
    return piece.spans[0].start * groups // piece.total
