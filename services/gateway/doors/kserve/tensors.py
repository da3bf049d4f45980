"""Tensors of the Open Inference Protocol: their elements, typed or as raw bytes. Knows no names of tensors.

Raw bytes are little-endian, in row-major order; an element of BYTES follows its length in 4 bytes.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protos import kserve_pb2 as kserve
from services.errors import invalid

MOST_DIMENSIONS = 8
FORMATS = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP16": ("e", ""),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    "BYTES": ("", "bytes_contents"),
}
"""For each datatype the struct code of an element and the list of InferTensorContents; FP16 has no list."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a request: its elements as numbers, booleans or strings."""

    name: str
    datatype: str
    values: list[Any]


def tensors(request: kserve.ModelInferRequest) -> Iterator[Tensor]:
    """The tensors of a request, whose names are unique. Raises WeftError."""
    raw, seen = request.raw_input_contents, set[str]()
    if raw and len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", "as many entries as `inputs`")
    for place, entry in enumerate(request.inputs):
        name = entry.name
        if name in seen:
            raise invalid(name, "given twice")
        seen.add(name)
        for key in entry.parameters:
            raise invalid(f"{name}.{key}", "no parameter of a tensor is supported", "UNSUPPORTED_FIELD")
        if entry.datatype not in FORMATS:
            raise invalid(name, f"datatype must be one of {', '.join(FORMATS)}")
        if raw:
            if entry.HasField("contents"):
                raise invalid(name, "either `contents` or `raw_input_contents`")
            values = _unpack(name, entry.datatype, raw[place])
        else:
            values = _listed(name, entry.datatype, entry.contents)
        _check_shape(name, entry.shape, len(values))
        yield Tensor(name, entry.datatype, _decoded(name, values) if entry.datatype == "BYTES" else values)


def add(response: kserve.ModelInferResponse, name: str, datatype: str, values: Sequence[Any], raw: bool) -> None:
    """Adds a tensor of one dimension to an answer; the elements of BYTES are strings."""
    output = response.outputs.add(name=name, datatype=datatype, shape=(len(values),))
    elements = [value.encode() for value in values] if datatype == "BYTES" else values
    if raw:
        response.raw_output_contents.append(_pack(datatype, elements))
    else:
        getattr(output.contents, FORMATS[datatype][1]).extend(elements)
        output.contents.SetInParent()


def packed(name: str, datatype: str, elements: Sequence[Any]) -> bytes:
    """The raw bytes of a tensor whose elements came as JSON. Raises WeftError."""
    if datatype == "BYTES":
        if not all(isinstance(element, str) for element in elements):
            raise invalid(name, "its elements are strings")
        return _pack(datatype, [element.encode("utf-8", "surrogatepass") for element in elements])
    kinds: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int, float) if datatype[:2] == "FP" else (int,)
    if not all(isinstance(element, kinds) and isinstance(element, bool) == (kinds == (bool,)) for element in elements):
        raise invalid(name, f"its elements are of {datatype}")
    try:
        return _pack(datatype, elements)
    except (struct.error, OverflowError):
        raise invalid(name, f"out of range for {datatype}") from None


def listed(datatype: str, contents: kserve.InferTensorContents) -> list[Any]:
    """The elements of an answer's tensor as JSON has them."""
    elements = getattr(contents, FORMATS[datatype][1])
    return [element.decode() for element in elements] if datatype == "BYTES" else list(elements)


def _unpack(name: str, datatype: str, data: bytes) -> list[Any]:
    if datatype == "BYTES":
        return list(_elements(name, data))
    code = FORMATS[datatype][0]
    count, rest = divmod(len(data), struct.calcsize(code))
    if rest:
        raise invalid(name, f"its raw bytes are not whole elements of {datatype}")
    return list(struct.unpack(f"<{count}{code}", data))


def _elements(name: str, data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        end = at + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, at)[0]
        if end > len(data) or end < at + _LENGTH.size:
            raise invalid(name, "its raw bytes are not whole elements of BYTES")
        yield data[at + _LENGTH.size : end]
        at = end


def _listed(name: str, datatype: str, contents: kserve.InferTensorContents) -> list[Any]:
    wanted = FORMATS[datatype][1]
    for field, _ in contents.ListFields():
        if field.name != wanted:
            raise invalid(name, f"{datatype} has its elements in {wanted or 'raw_input_contents'}")
    return list(getattr(contents, wanted)) if wanted else []


def _check_shape(name: str, shape: Sequence[int], count: int) -> None:
    if len(shape) > MOST_DIMENSIONS or any(size < 0 for size in shape) or math.prod(shape) != count:
        raise invalid(name, f"its shape does not describe its {count} elements")


def _decoded(name: str, values: list[bytes]) -> list[str]:
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError:
        raise invalid(name, "not UTF-8") from None


def _pack(datatype: str, elements: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(element)) + element for element in elements)
    return struct.pack(f"<{len(elements)}{FORMATS[datatype][0]}", *elements)
