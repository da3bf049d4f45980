"""The JSON form of the Open Inference Protocol's messages, with tensors as lists or as bytes behind the JSON. Pure.

Bytes behind the JSON are Triton's extension for binary data: the header `inference-header-content-length` has the size
of the JSON, and `binary_data_size` in the parameters of each tensor that of its bytes.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from google.protobuf import json_format
from google.protobuf.message import Message
from grpc import StatusCode

from protos import kserve_pb2 as kserve
from services.errors import WeftError, invalid
from services.gateway.doors.kserve import tensors
from services.gateway.doors.kserve.requests import Asked, apply, begin, complete, unknown
from services.gateway.doors.kserve.requests import parse as parse_message
from services.gateway.doors.kserve.values import flag, integer

Json: TypeAlias = dict[str, Any]
_REQUEST = {"id", "parameters", "inputs", "outputs"}
_INPUT = {"name", "datatype", "shape", "parameters", "data"}
_MOST_SIZE = (1 << 63) - 1
"""Of a dimension, as in the protocol's messages."""


def _object(name: str, value: Any, keys: set[str] | None = None) -> Json:
    """A JSON object with these keys alone. Raises WeftError."""
    if not isinstance(value, dict):
        raise invalid(name, "an object")
    if keys is not None and (others := sorted(value.keys() - keys)):
        raise unknown(others[0] if name == "request" else f"{name}.{others[0]}")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(name, "a list")
    return value


def parse(body: Json, model: str, version: str, rest: bytes) -> tuple[Asked, bool]:
    """A request, whose binary tensors have their bytes in `rest`. -> it, and whether the answer is binary, too.

    Raises WeftError.
    """
    _object("request", body, _REQUEST)
    parameters = dict(_object("parameters", body.get("parameters") or {}))
    is_binary = flag("binary_data_output", parameters.pop("binary_data_output", False))
    message = kserve.ModelInferRequest(model_name=model, model_version=version)
    caller_id = body.get("id", "")
    if not isinstance(caller_id, str):
        raise invalid("id", "a string")
    message.id = caller_id
    for each in _list("outputs", body.get("outputs") or []):
        output = _object("outputs", each, {"name", "parameters"})
        options = dict(_object("outputs.parameters", output.get("parameters") or {}))
        is_binary |= flag("binary_data", options.pop("binary_data", False))
        for key in options:
            raise invalid(f"{output.get('name')}.{key}", "no parameter of a tensor is supported", "UNSUPPORTED_FIELD")
        message.outputs.add(name=_name("outputs.name", output))
    for each in _list("inputs", body.get("inputs") or []):
        rest = _add_input(message, _object("inputs", each, _INPUT), rest)
    if rest:
        raise invalid("inputs", f"{len(rest)} bytes behind the JSON belong to no tensor")
    return parse_message(message, parameters), is_binary


def _name(place: str, entry: Json) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise invalid(place, "a string")
    return name


def _add_input(message: kserve.ModelInferRequest, entry: Json, rest: bytes) -> bytes:
    """Adds a tensor as raw bytes. -> what is left of the bytes behind the JSON."""
    name = _name("inputs.name", entry)
    datatype = entry.get("datatype")
    if not isinstance(datatype, str) or datatype not in tensors.FORMATS:
        raise invalid(name, f"datatype must be one of {', '.join(tensors.FORMATS)}")
    shape = [integer(f"{name}.shape", size) for size in _list(f"{name}.shape", entry.get("shape"))]
    if any(abs(size) > _MOST_SIZE for size in shape):
        raise invalid(f"{name}.shape", "out of range")
    options = dict(_object(f"{name}.parameters", entry.get("parameters") or {}))
    size = options.pop("binary_data_size", None)
    for key in options:
        raise invalid(f"{name}.{key}", "no parameter of a tensor is supported", "UNSUPPORTED_FIELD")
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    if size is None:
        elements = _flat(name, _list(name, entry.get("data")))
        message.raw_input_contents.append(tensors.packed(name, datatype, elements))
        return rest
    if "data" in entry or not 0 <= integer(f"{name}.binary_data_size", size) <= len(rest):
        raise invalid(name, "either `data` or `binary_data_size` bytes behind the JSON")
    message.raw_input_contents.append(rest[:size])
    return rest[size:]


def _flat(name: str, values: list[Any]) -> list[Any]:
    """The elements of nested lists, in row-major order. Raises WeftError."""
    for _ in range(tensors.MOST_DIMENSIONS):
        if not any(isinstance(value, list) for value in values):
            return values
        values = [each for value in values for each in (value if isinstance(value, list) else [value])]
    raise invalid(name, f"more than {tensors.MOST_DIMENSIONS} dimensions")


def parse_index(body: Json) -> bool:
    """A request for the index of models. -> whether only served ones are asked for. Raises WeftError."""
    _object("request", body, {"ready"})
    return flag("ready", body.get("ready", False))


def parse_generate(body: Json, model: str, version: str) -> Asked:
    """A request of Triton's `generate` extension: its keys are tensors, and `parameters` are further ones.

    Raises WeftError.
    """
    asked = begin(model, version, "")
    fields = dict(body)
    caller_id = fields.pop("id", "")
    if not isinstance(caller_id, str):
        raise invalid("id", "a string")
    asked.id = caller_id
    parameters = _object("parameters", fields.pop("parameters", None) or {})
    for name, value in (*parameters.items(), *fields.items()):
        if value is not None:
            apply(asked, name, value)
    return complete(asked)


# ---- answers ----


def response(message: kserve.ModelInferResponse) -> tuple[Json, bytes]:
    """An answer, and the bytes behind it: those of its tensors if they are raw."""
    head: Json = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        head["id"] = message.id
    raw = message.raw_output_contents
    outputs = []
    for place, output in enumerate(message.outputs):
        entry: Json = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if raw:
            entry["parameters"] = {"binary_data_size": len(raw[place])}
        else:
            entry["data"] = tensors.listed(output.datatype, output.contents)
        outputs.append(entry)
    head["outputs"] = outputs
    return head, b"".join(raw)


def generated(message: kserve.ModelInferResponse) -> Json:
    """An answer of the `generate` extension: a tensor of one element is that element."""
    found: Json = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        found["id"] = message.id
    for output in message.outputs:
        values = tensors.listed(output.datatype, output.contents)
        found[output.name] = values[0] if len(values) == 1 else values
    return found


def described(message: Message) -> Json:
    """A message of models or the server; integers are numbers."""
    found: Json = json_format.MessageToDict(message, preserving_proto_field_name=True)
    for key in ("inputs", "outputs", "input", "output"):
        for tensor in found.get(key, ()):
            for sizes in ("shape", "dims"):
                if sizes in tensor:
                    tensor[sizes] = [int(size) for size in tensor[sizes]]
    return found


def error(failure: WeftError) -> Mapping[str, Any]:
    """An error as Triton writes it, with its reason and field."""
    body = {"error": failure.message, "reason": failure.reason, "code": failure.code.name}
    return body | ({"field": failure.field} if failure.field else {})


def header_size(value: str | None, size: int) -> int:
    """The size of the JSON in a body of `size` bytes. Raises WeftError."""
    if value is None:
        return size
    if not (value.isascii() and value.isdecimal() and int(value) <= size):
        raise WeftError(
            StatusCode.INVALID_ARGUMENT,
            "INVALID_FIELD",
            "inference-header-content-length: the size of the JSON in bytes",
            field="inference-header-content-length",
        )
    return int(value)
