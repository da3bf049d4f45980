"""The error type of the mesh and its form on the wire. Messages contain no prompt text, paths or exception text.

Every error has a google.rpc.ErrorInfo{reason, domain}; an error of one field also a BadRequest; an error that is worth
a retry after a delay also a RetryInfo. Names that callers choose may be in a message and a field: both are one line of
limited length.
"""

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import Status, StatusCode
from grpc_status import rpc_status

from protos import mesh_pb2 as mesh

DOMAIN = "weft"
MOST_FIELD = 128
MOST_MESSAGE = 384
"""Characters. gRPC refuses metadata above 8 KiB, in which a character takes up to 9 bytes, and its status has the
message and the field twice."""
_CODES: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}


class WeftError(Exception):
    """A failure with a status code, a machine-readable reason and a message for the client."""

    def __init__(
        self,
        code: StatusCode,
        reason: str,
        message: str,
        *,
        field: str = "",
        retry_after_s: float = 0.0,
        retryable: bool = False,
    ) -> None:
        self.field = _line(field, MOST_FIELD)
        self.message = _line(message.replace(field, self.field) if field else message, MOST_MESSAGE)
        super().__init__(self.message)
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.retryable = retryable

    def status(self) -> Status:
        """The error as a gRPC status with details."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        details = [_pack(info)]
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
        if self.retry_after_s > 0:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        return rpc_status.to_status(status_pb2.Status(code=self.code.value[0], message=self.message, details=details))

    def failure(self) -> mesh.Failure:
        """The error as a message for the links between services."""
        return mesh.Failure(
            code=self.code.value[0],
            reason=self.reason,
            message=self.message,
            retry_after_s=self.retry_after_s,
            field=self.field,
            retryable=self.retryable,
        )

    @classmethod
    def from_failure(cls, failure: mesh.Failure) -> "WeftError":
        """The error that a message of a link between services describes."""
        return cls(
            _CODES.get(failure.code, StatusCode.INTERNAL),
            failure.reason,
            failure.message,
            field=failure.field,
            retry_after_s=failure.retry_after_s,
            retryable=failure.retryable,
        )


def invalid(field: str, message: str, reason: str = "INVALID_FIELD") -> WeftError:
    """An INVALID_ARGUMENT error; `message` states the rule that `field` breaks."""
    return WeftError(StatusCode.INVALID_ARGUMENT, reason, f"{field}: {message}", field=field)


def internal() -> WeftError:
    """An INTERNAL error: a bug of a service. The client receives no details."""
    return WeftError(StatusCode.INTERNAL, "INTERNAL", "internal error")


def unavailable(reason: str, message: str, retry_after_s: float = 1.0) -> WeftError:
    """An UNAVAILABLE error that is worth a retry after `retry_after_s` seconds."""
    return WeftError(StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s, retryable=True)


def exhausted(reason: str, message: str, retry_after_s: float) -> WeftError:
    """A RESOURCE_EXHAUSTED error: a limit is reached until about `retry_after_s` seconds from now."""
    return WeftError(StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after_s=retry_after_s)


def _line(text: str, most: int) -> str:
    """A text as one line of valid Unicode, cut if it is longer."""
    line = text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
