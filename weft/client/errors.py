"""Reads failed calls: the rich status and the receipt in the trailing metadata. Knows the wire format, no calls."""

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc import aio

from protos import inference_pb2 as api

RECEIPT_KEY = "weft-receipt-bin"
_STATUS_KEY = "grpc-status-details-bin"


class WeftError(Exception):
    """A call that failed. `code` is the gRPC status, `reason` the machine-readable cause ("" if the server gave none),
    `field` the invalid field, `retry_after_s` the delay before a useful retry (0 if unknown), `receipt` the cost."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float = 0.0,
        receipt: api.Receipt | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.receipt = receipt

    def __str__(self) -> str:
        return f"{self.code.name}{f'/{self.reason}' if self.reason else ''}: {self.message}"


class HeaderError(ValueError):
    """A value that metadata cannot carry, such as a key with a line break; the message is one line."""


def from_rpc(error: aio.AioRpcError) -> WeftError:
    """The error of a failed call, without the parts of its status that cannot be read."""
    trailing = {str(key): value for key, value in error.trailing_metadata() or ()}
    result = WeftError(error.code(), error.details() or error.code().name, receipt=read_receipt(trailing))
    status = _parse(_Status, trailing.get(_STATUS_KEY))
    for detail in status.details if status else ():
        kind = detail.type_url.rpartition("/")[2]
        if kind == "google.rpc.ErrorInfo" and (info := _parse(_ErrorInfo, detail.value)):
            result.reason = info.reason
        elif kind == "google.rpc.RetryInfo" and (retry := _parse(_RetryInfo, detail.value)):
            result.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif kind == "google.rpc.BadRequest" and (bad := _parse(_BadRequest, detail.value)):
            result.field = bad.field_violations[0].field if bad.field_violations else ""
    if not result.reason:
        result.message = _PLAIN.get(error.code(), result.message)
    return result


def from_response(error: api.RequestError) -> WeftError:
    """The error of a request of EmbedStream: the one that a call of Embed would raise."""
    return WeftError(
        _CODES.get(error.code, grpc.StatusCode.UNKNOWN),
        error.message,
        reason=error.reason,
        field=error.field,
        retry_after_s=error.retry_after_s,
        receipt=error.receipt if error.HasField("receipt") else None,
    )


def made_by_grpc(code: grpc.StatusCode) -> WeftError:
    """The error of a call that gRPC itself ends with this code."""
    return WeftError(code, _PLAIN[code])


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# Errors without a reason are made by gRPC, whose own texts hold addresses and the insides of its library.
_PLAIN = {
    grpc.StatusCode.UNAVAILABLE: "there is no connection to the mesh",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the deadline has passed",
    grpc.StatusCode.CANCELLED: "the call was cancelled",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a message is too large: a request has at most 1 MiB, an answer 16 MiB",
    grpc.StatusCode.UNIMPLEMENTED: "the server is no gateway of Weft",
}


def read_receipt(trailing: dict[str, Any]) -> api.Receipt | None:
    """The receipt in trailing metadata; None without one."""
    receipt: api.Receipt | None = _parse(api.Receipt, trailing.get(RECEIPT_KEY))
    return receipt


def _parse(kind: Any, data: Any) -> Any:
    if not isinstance(data, bytes):
        return None
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


_Field = descriptor_pb2.FieldDescriptorProto

# The google.rpc messages that errors carry, with the fields that are read: name, number, type, message type.
_LAYOUT: dict[str, list[tuple[str, int, "_Field.Type.ValueType", str]]] = {
    "Detail": [("type_url", 1, _Field.TYPE_STRING, ""), ("value", 2, _Field.TYPE_BYTES, "")],
    "Status": [("details", 3, _Field.TYPE_MESSAGE, "Detail")],
    "ErrorInfo": [("reason", 1, _Field.TYPE_STRING, "")],
    "Delay": [("seconds", 1, _Field.TYPE_INT64, ""), ("nanos", 2, _Field.TYPE_INT32, "")],
    "RetryInfo": [("retry_delay", 1, _Field.TYPE_MESSAGE, "Delay")],
    "Violation": [("field", 1, _Field.TYPE_STRING, "")],
    "BadRequest": [("field_violations", 1, _Field.TYPE_MESSAGE, "Violation")],
}
_REPEATED = {"details", "field_violations"}


def _messages() -> dict[str, Any]:
    """The classes of _LAYOUT, in a pool of their own, so that no package of google.rpc is needed."""
    package = "weft.client"
    file = descriptor_pb2.FileDescriptorProto(name="client/status.proto", package=package, syntax="proto3")
    for name, fields in _LAYOUT.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            label = _Field.LABEL_REPEATED if field in _REPEATED else _Field.LABEL_OPTIONAL
            type_name = f".{package}.{of}" if of else None
            message.field.add(name=field, number=number, label=label, type=kind, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _LAYOUT}


_MESSAGES = _messages()
_Status, _ErrorInfo = _MESSAGES["Status"], _MESSAGES["ErrorInfo"]
_RetryInfo, _BadRequest = _MESSAGES["RetryInfo"], _MESSAGES["BadRequest"]
