"""Reads tensors of a checkpoint from safetensors files, one at a time. Knows headers, never what a tensor is for."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.loader.files import check_regular, parse_json
from services.worker.loader.weight_files import INDEX, SINGLE, owners_in, single_file
from services.worker.parallel.shards import Span

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {
    **_PLAIN,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
FLOATS = tuple(_PLAIN.values())
"""Number formats of tensors that are not quantized."""
_MOST_HEADER_BYTES = 32 << 20
"""Largest header: 150 bytes for each of 200,000 tensors."""
_MOST_TENSORS = 200_000
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What is read of a tensor."""

    dimension: int
    spans: tuple[Span, ...]
    """Spans of this dimension, one after another."""
    subtracted: int = 0
    """From the tensor's numbers."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's entry in the header of its file."""

    shape: tuple[int, ...]
    """The shape of the part that is read."""
    dtype: torch.dtype
    shard: int = 0
    """Index of its file in `Checkpoint.shards`."""
    offset: int = 0
    """Its first byte, from the beginning of the file."""
    stored_name: str = ""
    """Its name in that file, if `Checkpoint.headers` has it by another."""
    part: TensorPart | None = None
    """What is read of it; None: all."""
    place: tuple[int, int] | None = None
    """It is a part of that tensor: from this row of this matrix on; None: the whole."""

    @property
    def elements(self) -> int:
        """How many numbers the tensor has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in its file."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers are read and whose files are as long as these say."""

    shards: tuple[Path, ...]
    headers: dict[str, TensorHeader]

    @property
    def parameters(self) -> int:
        """How many numbers all tensors have."""
        return sum(header.elements for header in self.headers.values())

    @property
    def nbytes(self) -> int:
        """Bytes that all tensors take in their files."""
        return sum(header.nbytes for header in self.headers.values())

    @property
    def is_part(self) -> bool:
        """Whether some of its tensors are read in part."""
        return any(header.part is not None for header in self.headers.values())

    def renamed(self, name_of: Callable[[str], str | None]) -> "Checkpoint":
        """The tensors by other names, without those whose name is None. Raises CheckpointError if two get one name."""
        headers: dict[str, TensorHeader] = {}
        for stored, header in self.headers.items():
            name = name_of(stored)
            if name in headers:
                raise CheckpointError(f"tensor {name} is in the checkpoint twice, the second time as {stored}")
            if name is not None:
                headers[name] = header if name == stored else replace(header, stored_name=stored)
        return replace(self, headers=headers)

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads a tensor by its name; any thread may call it. Raises CheckpointError."""
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(safe_open(path, framework="pt")) for path in self.shards]
                yield lambda name: _read(files[self.headers[name].shard], name, self.headers[name])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"a shard cannot be read: {type(error).__name__}") from None

    def read_shard(self, shard: int) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of one file; each tensor is read when the iterator reaches it. Raises CheckpointError."""
        path = self.shards[shard]
        try:
            with safe_open(path, framework="pt") as file:
                for name, header in self.headers.items():
                    if header.shard == shard:
                        yield name, _read(file, name, header)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None


def _read(file: Any, name: str, header: TensorHeader) -> Tensor:
    """A tensor of an open file, or the part of it that is wanted: no more is read."""
    stored, part = header.stored_name or name, header.part
    if part is None and header.place is None:
        tensor: Tensor = file.get_tensor(stored)
        return tensor
    rows = file.get_slice(stored)
    pieces = [rows[index] for index in _indices(header)]
    joined: Tensor = pieces[0] if part is None or len(pieces) == 1 else _join(pieces, part.dimension)
    return joined - part.subtracted if part is not None and part.subtracted else joined


def _indices(header: TensorHeader) -> Iterator[tuple[int | slice, ...]]:
    """Which pieces of a stored tensor are read."""
    part, (matrix, first) = header.part, header.place or (None, 0)
    before = () if matrix is None else (matrix,)
    if part is None:
        yield (*before, slice(first, first + header.shape[0]))
        return
    for span in part.spans:
        if part.dimension == 0:
            yield (*before, slice(first + span.start, first + span.stop))
        else:
            rows = slice(None) if matrix is None else slice(first, first + header.shape[0])
            yield (*before, rows, slice(span.start, span.stop))


def _join(pieces: list[Tensor], dimension: int) -> Tensor:
    """Joined as bytes where torch does not join the number format."""
    dtype = pieces[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(pieces, dimension)
    return torch.cat([piece.view(torch.uint8) for piece in pieces], dimension).view(dtype)


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Find the files and read their headers. Raises CheckpointError if one is missing, truncated or not safetensors."""
    if owners := owners_in(model_dir):
        shards = tuple(model_dir / name for name in sorted(set(owners.values())))
    elif single := single_file(model_dir):
        shards = (single,)
    else:
        found = _what_else(model_dir)
        raise CheckpointError(f"{SINGLE} or {INDEX} is needed; {found}")
    headers: dict[str, TensorHeader] = {}
    for number, shard in enumerate(shards):
        for name, header in _read_header(shard, number).items():
            if name in headers:
                raise CheckpointError(f"tensor {name} is in two files")
            if owners and owners.get(name) != shard.name:
                raise CheckpointError(f"tensor {name} in {shard.name} is not where the index says")
            headers[name] = header
        if len(headers) > _MOST_TENSORS:
            raise CheckpointError(f"the checkpoint has more than {_MOST_TENSORS} tensors")
    if absent := owners.keys() - headers.keys():
        raise CheckpointError(f"tensor {min(absent)} is in the index but in no file")
    return Checkpoint(shards, headers)


def _what_else(model_dir: Path) -> str:
    """The weights in a folder that are not read, for people."""
    for patterns, kind in ((("*.bin", "*.pt", "*.pth"), "a pickle"), (("*.gguf",), "of a format that is not read")):
        if others := sorted(path.name for pattern in patterns for path in model_dir.glob(pattern)):
            return f"found only {others[0]}, which is {kind}"
    return "found no weights"


def open_file(path: Path) -> Checkpoint:
    """One file as a checkpoint. Raises CheckpointError if it is missing, truncated or not safetensors."""
    headers = _read_header(path)
    return Checkpoint((path,), headers)


def type_name(dtype: torch.dtype) -> str:
    """The name that safetensors files use for a number format."""
    return next(name for name, each in _DTYPES.items() if each == dtype)


def check_plain(name: str, header: TensorHeader) -> None:
    """Raises CheckpointError if a tensor is quantized though the checkpoint has no quantization_config."""
    if header.dtype not in FLOATS:
        kind, plain = type_name(header.dtype), ", ".join(_PLAIN)
        raise CheckpointError(f"tensor {name} has type {kind} and no quantization_config; plain are {plain}")


def _read_header(path: Path, shard: int = 0) -> dict[str, TensorHeader]:
    """The header of a safetensors file, checked against the file's length. Raises CheckpointError."""
    try:
        check_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{path.name} is truncated or not a safetensors file")
            if length > _MOST_HEADER_BYTES:
                raise CheckpointError(f"{path.name} has a header of more than {_MOST_HEADER_BYTES >> 20} MiB")
            entries = parse_json(file.read(length), path.name)
    except FileNotFoundError:
        raise CheckpointError(f"shard {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path.name} has a header that is no object")
    entries.pop("__metadata__", None)
    if len(entries) > _MOST_TENSORS:
        raise CheckpointError(f"{path.name} has more than {_MOST_TENSORS} tensors")
    return {name: _read_entry(path, shard, name, entry, 8 + length, size) for name, entry in entries.items()}


def _read_entry(path: Path, shard: int, name: str, entry: Any, data_begin: int, size: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), _naturals(entry["shape"]), _naturals(entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path.name} describes tensor {name} badly") from None
    if len(shape) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{path.name}: tensor {name} has more than {_MOST_DIMENSIONS} dimensions")
    if dtype not in _DTYPES:
        raise CheckpointError(f"tensor {name} has type {dtype}; supported are {', '.join(_DTYPES)}")
    header = TensorHeader(shape, _DTYPES[dtype], shard, data_begin + begin)
    data_bytes = size - data_begin
    if end > data_bytes:
        raise CheckpointError(f"{path.name} is truncated: tensor {name} ends at byte {end} of {data_bytes}")
    if end - begin != header.nbytes:
        raise CheckpointError(f"{path.name}: tensor {name} of shape {list(shape)} has {end - begin} bytes")
    return header


def _naturals(values: Any) -> tuple[int, ...]:
    """A list of sizes or offsets as a tuple. Raises TypeError or ValueError if one is no natural number."""
    numbers = tuple(values)
    if not set(map(type, numbers)) <= {int} or min(numbers, default=0) < 0:
        raise ValueError("neither sizes nor places")
    return numbers
